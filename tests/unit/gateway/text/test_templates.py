"""Templates against transformers' own rendering, and the walls of the sandbox."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from byte_model import tokenizer_spec, write_byte_model
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from gateway.text.templates import ChatTemplate, TemplateRefused, load_template
from gateway.text.tokenizer import ModelTokenizer

CHATML = (
    "{%- for message in messages %}{{- '<|eos|>' + message.role + '\\n' + message.content | trim + '<|pad|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|eos|>assistant\\n' }}{%- endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "blocks": "{% for m in messages %}\n    {% if m.role == 'user' %}\nU: {{ m.content }}\n    {% endif %}\n"
    "    {% generation %}\n{{ m.content }}{% endgeneration %}\n{% endfor %}",
    "json": "{{ bos_token }}{{ messages | tojson }}{{ messages | tojson(indent=2) }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "loopcontrols": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "strings": "{% for m in messages %}{{ m.content.split(' ')[0] }}{{ m.content[:3] | upper }}{% endfor %}",
    "strftime": "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}{% endfor %}",
}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": '  You are <b>helpful</b> & "kind". '},
    {"role": "user", "content": "Zwölf Boxkämpfer 漢字 🎉\n\n  indented"},
    {"role": "assistant", "content": "ok <"},
    {"role": "user", "content": "{{ not a template }}"},
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    directory = write_byte_model(tmp_path_factory.mktemp("model"))
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(str(directory))
    return tokenizer


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("with_prompt", [True, False])
def test_text_and_ids_are_those_of_transformers(
    reference: PreTrainedTokenizerFast, name: str, with_prompt: bool
) -> None:
    source = TEMPLATES[name]
    template = ChatTemplate(source, {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": None})
    expected = reference.apply_chat_template(
        MESSAGES, chat_template=source, tokenize=False, add_generation_prompt=with_prompt
    )
    assert template.render(MESSAGES, add_generation_prompt=with_prompt) == expected
    if name in {"chatml", "blocks", "loopcontrols", "strftime"}:
        tokenizer = ModelTokenizer(tokenizer_spec(), source)
        broken_up = [{**m, "content": tokenizer.break_up(m["content"])} for m in MESSAGES]
        ids = tokenizer.encode_rendered(template.render(broken_up, add_generation_prompt=with_prompt))
        assert ids == reference.encode(expected, add_special_tokens=False)


def test_a_template_may_refuse_and_its_words_are_passed_on() -> None:
    template = ChatTemplate("{{ raise_exception('Roles must alternate.') }}")
    with pytest.raises(TemplateRefused, match="Roles must alternate"):
        template.render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ self.__init__.__globals__ }}",
        "{% set ns = namespace(__class__=1) %}",
        "{{ messages[0].content.missing.deeper }}",
        "{{ 1 / 0 }}",
        "{{ undefined_function() }}",
        "{{ range(10000000) | list }}",
        "{{ cycler.__init__ }}",
    ],
)
def test_a_template_cannot_reach_out_of_its_sandbox(source: str) -> None:
    try:
        rendered = ChatTemplate(source).render(MESSAGES)
    except TemplateRefused:
        rendered = ""
    assert rendered == ""


def test_a_template_has_a_second() -> None:
    ticks = iter(range(1000))
    template = ChatTemplate("{% for m in range(100) %}{{ m }}{% endfor %}")
    with pytest.raises(TemplateRefused, match="too long"):
        template.render(MESSAGES, clock=lambda: float(next(ticks)))


def test_a_template_that_does_not_compile_stops_the_start() -> None:
    with pytest.raises(ValueError, match="does not compile"):
        ChatTemplate("{% for %}")


def test_a_template_is_found_in_its_file_or_in_the_configuration(tmp_path: Path) -> None:
    assert load_template(tmp_path) is None
    config = {
        "chat_template": [{"name": "rag", "template": "r"}, {"name": "default", "template": "{{ eos_token }}"}],
        "eos_token": {"content": "<e>"},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = load_template(tmp_path)
    assert template is not None
    assert template.render([]) == "<e>"
    (tmp_path / "chat_template.jinja").write_text("own file")
    template = load_template(tmp_path)
    assert template is not None
    assert template.render([]) == "own file"
