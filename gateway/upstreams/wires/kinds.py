"""The APIs that upstreams speak, by the kind that is declared."""

from __future__ import annotations

from gateway.base.upstream_source import Kind
from gateway.upstreams.wires.anthropic import AnthropicWire
from gateway.upstreams.wires.openai import AzureWire, OpenAIWire
from gateway.upstreams.wires.wire import Wire

_WIRES: dict[Kind, Wire] = {"openai": OpenAIWire(), "azure": AzureWire(), "anthropic": AnthropicWire()}


def of(kind: Kind) -> Wire:
    return _WIRES[kind]
