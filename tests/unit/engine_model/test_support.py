"""O9: what no tensor need be read for is refused by the configuration, in words about the model."""

from __future__ import annotations

import pytest
from transformers import BertConfig, LlamaConfig, RobertaConfig

from workers.engine.checkpoint.support import refuse_unsupported
from workers.engine.values.errors import ModelError


@pytest.mark.parametrize("kind", [BertConfig, RobertaConfig])
def test_o9_an_encoder_is_not_served(kind):
    with pytest.raises(ModelError, match="cannot be served: it is an encoder, whose attention"):
        refuse_unsupported(kind())


@pytest.mark.parametrize("head", ["LlamaForSequenceClassification", "LlamaForTokenClassification"])
def test_o9_a_checkpoint_with_another_head_is_not_served(head):
    with pytest.raises(ModelError, match=f"its head is that of {head}"):
        refuse_unsupported(LlamaConfig(architectures=[head]))


@pytest.mark.parametrize("named", [None, [], ["LlamaForCausalLM"], ["LLaMAForCausalLM"], ["LlamaModel"]])
def test_o9_whoever_continues_texts_is_served(named):
    refuse_unsupported(LlamaConfig(architectures=named))
    refuse_unsupported(BertConfig(is_decoder=True))
