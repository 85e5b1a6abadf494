"""The tokenizer: byte-level BPE, and the chat template that belongs to it.

Every text survives encoding and decoding unchanged: there is no normalizer, and all 256 bytes are in the vocabulary.
The module knows nothing of where its training text comes from.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import jinja2
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 4096
MAX_LENGTH = 2048
PAD, BOS, EOS, IM_START, IM_END = "<|pad|>", "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"
SPECIAL = [PAD, BOS, EOS, IM_START, IM_END]

# Words with the one character before them (`.name`, `_part`, ` word`), single digits, runs of
# punctuation with the line end that follows, and indentation apart from the word after it.
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('Unknown role: ' ~ message.role) }}
    {%- endif %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- elif message.content %}
        {%- for part in message.content %}
            {%- if part.type != 'text' %}
                {{- raise_exception('Unsupported content: ' ~ part.type) }}
            {%- endif %}
            {{- part.text }}
        {%- endfor %}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- 'call ' ~ call.function.name ~ ' ' ~ call.function.arguments }}
        {%- if not loop.last %}
            {{- '\\n' }}
        {%- endif %}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def train(texts: Iterable[str]) -> Tokenizer:
    """Learns the merges; the special tokens take the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the files that `transformers` and the gateway read."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": [IM_START, IM_END],
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LENGTH,
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def renderer() -> jinja2.Template:
    """Returns the chat template, compiled as `transformers` compiles it."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)  # noqa: S701 - no HTML

    def raise_exception(text: str) -> None:
        raise jinja2.TemplateError(text)

    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(CHAT_TEMPLATE)
