"""Small tokenizers with the special tokens of encoders and of decoders that give vectors, as their makers save them."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from workers.process.byte_level import BYTE_OF_CHAR


def write_encoder_tokenizer(directory: Path) -> None:
    """Letters as pieces, lower case, `[CLS] A [SEP] B [SEP]` with two segments; as BERT's."""
    letters = [chr(code) for code in range(33, 127) if not chr(code).isupper()]
    pieces = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *letters, *(f"##{letter}" for letter in letters)]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[PAD]", "[CLS]", "[SEP]", "[UNK]"])
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    _settings(directory, cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]", unk_token="[UNK]")


def write_decoder_tokenizer(directory: Path) -> None:
    """Bytes as tokens; a text ends with `<|endoftext|>`, as Qwen3-Embedding's do. `yes` and `no` are single tokens."""
    vocab = dict(BYTE_OF_CHAR)
    merges = []
    for left, right in (("y", "e"), ("ye", "s"), ("n", "o")):
        vocab[left + right] = len(vocab)
        merges.append((left, right))
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    end = tokenizer.token_to_id("<|endoftext|>")
    tokenizer.post_processor = processors.TemplateProcessing("$A <|endoftext|>", None, [("<|endoftext|>", end)])
    tokenizer.save(str(directory / "tokenizer.json"))
    _settings(directory, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def _settings(directory: Path, **tokens: str) -> None:
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | tokens
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
