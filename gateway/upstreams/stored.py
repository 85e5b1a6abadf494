"""Upstreams in force: those of the settings, and those that were added over the API and are stored with a sealed key."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence

import pydantic

from accounting.database.sealing import SealBroken
from accounting.upstreams import upstreams
from accounting.upstreams.upstreams import StoredUpstream
from gateway.base.upstream_source import UpstreamSource
from gateway.upstreams.wires.values import Upstream

logger = logging.getLogger(__name__)


def declared(sources: Mapping[str, UpstreamSource], environ: Mapping[str, str] = os.environ) -> list[Upstream]:
    """Returns the upstreams of the settings, with the credentials that their variables have."""
    return [
        Upstream(
            name,
            source,
            environ.get(source.key_env, ""),
            cost_credential=environ.get(source.costs.key_env, "") if source.costs is not None else "",
        )
        for name, source in sources.items()
    ]


def in_force(ours: Sequence[Upstream], stored: Sequence[StoredUpstream], key: bytes) -> list[Upstream]:
    """Returns all upstreams. The settings win over a stored one of the same name."""
    names = {upstream.name for upstream in ours}
    return [*ours, *(one for one in _opened(stored, key) if one.name not in names)]


def _opened(stored: Sequence[StoredUpstream], key: bytes) -> Iterator[Upstream]:
    for one in stored:
        try:
            source = UpstreamSource.model_validate(one.declared)
            keys = upstreams.opened(key, one), upstreams.opened_for_costs(key, one)
            yield Upstream(one.name, source, keys[0], is_stored=True, cost_credential=keys[1])
        except SealBroken:
            logger.warning("upstream_credential_unreadable", extra={"upstream": one.name})
        except pydantic.ValidationError:
            logger.warning("upstream_declaration_unreadable", extra={"upstream": one.name})
