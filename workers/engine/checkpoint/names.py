"""The names of tensors: from those of a checkpoint to those of the model that is built here.

It knows patterns only. transformers has a table of renamings for each model type, which this module applies; the
tensors themselves are read elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from functools import cached_property

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from workers.engine.values.errors import ModelError

_DERIVED = (r"rotary_emb\.inv_freq$", r"(attention|attn)\.(masked_)?bias$")
"""Names that old checkpoints carry although they follow from the configuration."""
_TEXT = (
    (re.compile(r"^(model\.)?language_model\.lm_head\."), "lm_head."),
    (re.compile(r"^language_model\.model\."), "model."),
    (re.compile(r"^model\.language_model\."), "model."),
)
"""Names under which a wrapper keeps its text model, and those inside it: the older form first, then that of transformers 5."""
_NOT_TEXT = re.compile(
    r"^(model\.)?(vision_tower|vision_model|visual|vision_embed_tokens|multi_modal_projector|audio_tower|embed_vision)\."
)


class Names:
    """The names of one model."""

    def __init__(self, model: PreTrainedModel, known: Collection[str], is_wrapped: bool = False) -> None:
        """`known` has the model's own names. A wrapped model is the text part of a model that takes images, too."""
        self._known = known
        self._prefix = f"{model.base_model_prefix}."
        self._is_wrapped = is_wrapped
        self._model = model
        self._ignored = (*_DERIVED, *(model._keys_to_ignore_on_load_unexpected or ()))

    @cached_property
    def _renamings(self) -> list[WeightRenaming]:
        """The renamings for the model's type. transformers compiles those of all types for it, which takes half a second,
        so they are made where a tensor needs them: most checkpoints have the model's own names.
        """
        return [one for one in get_model_conversion_mapping(self._model) if isinstance(one, WeightRenaming)]

    def text(self, name: str) -> str | None:
        """Returns the name inside the text model; None for a tensor of another part of a wrapper."""
        if not self._is_wrapped:
            return name
        if _NOT_TEXT.match(name):
            return None
        for pattern, instead in _TEXT:
            if pattern.match(name):
                return pattern.sub(instead, name)
        return name

    def forms(self, name: str) -> Iterator[str]:
        """Yields the names that the model may have for a tensor: the same; that with the base model's prefix, for one
        that was saved without its head; that after transformers' renamings.
        """
        yield name
        yield self._prefix + name
        for renaming in self._renamings:
            name, _ = renaming.rename_source_key(name)
        yield name

    def is_bias_of_none(self, name: str) -> bool:
        """Says whether a name is that of a bias of a layer which has none in the model."""
        text = self.text(name) or ""
        path, _, suffix = text.rpartition(".")
        return suffix == "bias" and self._known_form(f"{path}.weight") is not None and self._known_form(text) is None

    def resolve(self, name: str) -> str | None:
        """Returns the model's name for a checkpoint's name; None for a tensor that is not needed. Raises ModelError for
        one that the model has no place for.
        """
        text = self.text(name)
        if text is None:
            return None
        if (form := self._known_form(text)) is not None:
            return form
        if any(re.search(pattern, text) for pattern in self._ignored):
            return None
        raise ModelError(f"The checkpoint has a tensor {name} that the model has no place for.")

    def _known_form(self, text: str) -> str | None:
        return next((form for form in self.forms(text) if form in self._known), None)
