"""Reads served models from their directories: tokenizer, template, limits and defaults."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from gateway.base.settings import ModelSource, SettingsError
from gateway.generation.served.models import ServedModel
from gateway.parsers.dialects import OutputSyntax
from gateway.schema.sampling import Defaults
from gateway.text.templates import ChatTemplate, load_template
from gateway.text.tokenizer import ModelTokenizer

UNNAMED_CONTEXT = 131_072
"""The most positions of a model whose configuration names none."""


def load_all(
    sources: Mapping[str, ModelSource], known: Mapping[str, ServedModel] | None = None, foreign: Collection[str] = ()
) -> dict[str, ServedModel]:
    """Reads models from their directories. One of `known` whose settings are the same is not read again. `foreign` are
    the names of models that upstreams answer for. Raises `SettingsError`.
    """
    check_names(sources, foreign)
    old = known or {}
    return {
        name: old[name] if name in old and old[name].source == source else load(name, source)
        for name, source in sources.items()
    }


def check_names(sources: Mapping[str, ModelSource], foreign: Collection[str] = ()) -> None:
    """Raises `SettingsError` for an alias that is also another name, and for a fallback that is no model."""
    names = {*sources, *foreign}
    owners: dict[str, str] = {name: name for name in sources}
    for name, source in sources.items():
        for alias in source.aliases:
            if owners.setdefault(alias, name) != name or alias == name:
                raise SettingsError(
                    f"The alias {alias} of the model {name} is already a name of {owners[alias]}: choose another."
                )
        for other in source.fallbacks:
            if other not in names or other == name:
                meant = difflib.get_close_matches(other, sorted(names - {name}), n=1)
                hint = f" Did you mean {meant[0]}?" if meant else " A fallback is the name of another served model."
                raise SettingsError(f"The model {name} has the fallback {other}, which is not served.{hint}")


def load(name: str, source: ModelSource) -> ServedModel:
    """Reads a model from its directory. Raises `SettingsError` for a directory that cannot be served."""
    directory = Path(source.path)
    try:
        config = _json(directory / "config.json")
        text_config = config.get("text_config") or config
        template = load_template(directory)
        num_rows = text_config.get("vocab_size")
        tokenizer = ModelTokenizer.load(directory, template.source if template else "", num_rows)
        syntax = _syntax(template, source)
        created = int((directory / "config.json").stat().st_mtime)
        context = _context(text_config)
        defaults = _defaults(directory / "generation_config.json")
        end_ids = _end_ids(directory / "generation_config.json", config, text_config)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:  # somebody else wrote these files
        raise SettingsError(f"Cannot serve the model {name} from {directory}: {error}.") from None
    return ServedModel(
        id=name,
        tokenizer=tokenizer,
        template=template,
        max_model_len=min(context, source.max_model_len or context),
        max_output_tokens=source.max_output_tokens,
        defaults=defaults,
        created=created,
        end_ids=end_ids,
        syntax=syntax,
        aliases=source.aliases,
        fallbacks=source.fallbacks,
        source=source,
        counter=tokenizer.count,
    )


def _syntax(template: ChatTemplate | None, source: ModelSource) -> OutputSyntax:
    """Returns the syntax of the model's outputs. A model whose template knows no tools gets them in words, in Hermes' form."""
    if template is None:
        return OutputSyntax.of("", source.tool_format, source.reasoning_format)
    told = "" if template.knows_tools else "hermes"
    return OutputSyntax.of(template.source, source.tool_format or told, source.reasoning_format)


def _json(path: Path) -> dict[str, Any]:
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])


def _defaults(path: Path) -> Defaults:
    config = _json(path) if path.is_file() else {}
    known = {name: config[name] for name in Defaults.__struct_fields__ if config.get(name) is not None}
    return msgspec.convert(known, Defaults, strict=False)


def _context(text_config: dict[str, Any]) -> int:
    """Returns the positions that a configuration names. Some leave out what is the default of their class: then the
    worker alone knows, whose context is the bound.
    """
    return int(text_config.get("max_position_embeddings") or text_config.get("n_positions") or UNNAMED_CONTEXT)


def _end_ids(path: Path, *configs: dict[str, Any]) -> tuple[int, ...]:
    """Finds end tokens as a worker does: the generation settings win over the configuration, and a configuration over
    that of the text model inside it.
    """
    given = [_json(path)] if path.is_file() else []
    found = (config.get("eos_token_id") for config in (*given, *configs))
    ids = next((value for value in found if value is not None), None)
    return msgspec.convert([] if ids is None else ids if isinstance(ids, list) else [ids], tuple[int, ...])
