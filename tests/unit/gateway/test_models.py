"""What a gateway reads of a model's directory, and the names of several models."""

from __future__ import annotations

import json

import pytest
from byte_model import write_byte_model

from gateway.base.errors import ApiError
from gateway.base.settings import ModelSource, SettingsError
from gateway.generation.served.model_files import UNNAMED_CONTEXT, check_names, load, load_all
from gateway.generation.served.models import Models
from gateway.schema.chat import template_messages


@pytest.fixture
def directory(tmp_path):
    return write_byte_model(tmp_path / "model", 2048)


def change(path, **fields):
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def source(directory, **more) -> ModelSource:
    return ModelSource(path=str(directory), **more)


def test_a_wrappers_context_and_end_tokens_are_found(directory):
    (directory / "generation_config.json").unlink(missing_ok=True)
    text = {"model_type": "gemma3_text", "eos_token_id": 3}
    (directory / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    assert load("m", source(directory)).end_ids == (3,)
    assert load("m", source(directory)).max_model_len == UNNAMED_CONTEXT
    change(directory / "config.json", eos_token_id=[5, 6], text_config={**text, "max_position_embeddings": 64})
    assert load("m", source(directory)).end_ids == (5, 6)
    assert load("m", source(directory)).max_model_len == 64


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("generation_config.json", '{"eos_token_id": "</s>"}'),
        ("generation_config.json", '{"temperature": "hot"}'),
        ("generation_config.json", '{"temperature": 0.'),
        ("generation_config.json", "[]"),
        ("config.json", '{"max_position_embeddings": "many"}'),
        ("config.json", '{"max_position_embeddings": [1]}'),
        ("config.json", '{"text_config": [1]}'),
        ("config.json", '{"vocab_size": "many"}'),
        ("tokenizer_config.json", "[1]"),
        ("tokenizer_config.json", '{"chat_template": 1}'),
        ("tokenizer.json", "{}"),
    ],
)
def test_a_file_that_is_wrong_is_the_models_fault_and_named(directory, name, content):
    (directory / name).write_text(content)
    with pytest.raises(SettingsError, match="Cannot serve the model m from"):
        load("m", source(directory))


def test_an_added_token_that_the_model_has_no_row_for_is_outside_of_the_vocabulary(directory):
    whole = load("m", source(directory)).tokenizer.vocab_size
    change(directory / "config.json", vocab_size=whole + 64)
    assert load("m", source(directory)).tokenizer.vocab_size == whole
    change(directory / "config.json", vocab_size=whole - 1)
    assert load("m", source(directory)).tokenizer.vocab_size == whole - 1


def test_what_is_written_as_an_added_token_without_a_row_is_text(directory):
    """It became an id that no worker serves: a 500."""
    spec = json.loads((directory / "tokenizer.json").read_bytes())
    whole = max(token["id"] for token in spec["added_tokens"]) + 1
    whole = max(whole, load("m", source(directory)).tokenizer.vocab_size)
    spec["added_tokens"].append({**spec["added_tokens"][-1], "id": whole, "content": "<seen>", "special": False})
    (directory / "tokenizer.json").write_text(json.dumps(spec))
    change(directory / "config.json", vocab_size=whole)
    assert max(load("m", source(directory)).tokenizer.encode_plain("what was <seen> there")) < whole
    change(directory / "config.json", vocab_size=whole + 1)
    assert max(load("m", source(directory)).tokenizer.encode_plain("what was <seen> there")) == whole


def test_the_operators_context_is_a_bound_and_no_promise(directory):
    assert load("m", source(directory, max_model_len=100)).max_model_len == 100
    assert load("m", source(directory, max_model_len=1 << 20)).max_model_len == 2048


def test_a_template_may_be_where_models_with_images_have_it(directory):
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        (directory / name).unlink(missing_ok=True)
    assert load("m", source(directory)).capabilities == ("completions",)
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    assert load("m", source(directory)).capabilities == ("completions", "chat")


@pytest.mark.parametrize(
    ("kind", "named"),
    [("image_url", "an image"), ("input_audio", "audio"), ("video_url", "a video"), ("file", "a file")],
)
def test_parts_that_are_not_text_are_named_in_the_refusal(kind, named):
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": kind}]}]
    with pytest.raises(ApiError) as refused:
        template_messages(messages, lambda text, own: text)
    assert refused.value.message == f"This model reads text only, so {named} cannot be part of a message."
    assert (refused.value.status, refused.value.param) == (400, "messages[0].content[1]")


def test_a_part_whose_type_is_no_text_is_refused():
    with pytest.raises(ApiError, match="type of content part is unknown"):
        template_messages([{"role": "user", "content": [{"type": []}]}], lambda text, own: text)


@pytest.mark.parametrize(
    ("models", "sentence"),
    [
        ({"a": {"aliases": ["b"]}, "b": {}}, "The alias b of the model a is already a name of b"),
        ({"a": {"aliases": ["x"]}, "b": {"aliases": ["x"]}}, "The alias x of the model b is already a name of a"),
        ({"a": {"aliases": ["a"]}}, "The alias a of the model a is already a name of a"),
        ({"a": {"fallbacks": ["a"]}}, "has the fallback a, which is not served"),
        ({"small": {}, "big": {"fallbacks": ["smal"]}}, r"Did you mean small\?"),
    ],
)
def test_names_that_mean_two_things_are_refused(models, sentence):
    with pytest.raises(SettingsError, match=sentence):
        check_names({name: ModelSource(path="/x", **more) for name, more in models.items()})


def test_a_model_with_the_same_settings_is_not_read_again(directory):
    first = load_all({"m": source(directory)})
    assert load_all({"m": source(directory)}, first)["m"] is first["m"]
    assert load_all({"m": source(directory, aliases=("n",))}, first)["m"] is not first["m"]
    assert Models(first).ids == ("m",)
