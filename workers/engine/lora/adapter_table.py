"""The adapters that are loaded and unloaded while the worker serves: those that are loaded, those that failed, and
those that wait for their last sequence.

The engine thread owns them; files are read elsewhere and arrive as values. Every call is idempotent, because every
gateway sends the same commands. An adapter is removed only when no attempt and no step in flight can still use it.
"""

from __future__ import annotations

import logging
from collections.abc import Set
from dataclasses import dataclass

from workers.engine.values.errors import ModelError
from workers.engine.values.plan import AdapterWeights, StepRunner
from workers.protocol.reports import AdapterState

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdapterRead:
    """The result of reading one adapter: its weights, or the error."""

    name: str
    weights: AdapterWeights | ModelError


class AdapterTable:
    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self._states = {name: AdapterState(name, "loaded", one.identity) for name, one in runner.adapters.items()}
        self._changed = bool(self._states)

    @property
    def leaving(self) -> Set[str]:
        """The names of adapters that are being unloaded; they take no new attempts."""
        return {name for name, one in self._states.items() if one.state == "unloading"}

    def put(self, read: AdapterRead) -> None:
        """Loads an adapter that was read. An adapter that is already loaded, or is being unloaded, stays as it is."""
        known = self._states.get(read.name)
        if known is not None and known.state != "failed":
            return
        try:
            if isinstance(read.weights, ModelError):
                raise read.weights
            self._runner.add_adapter(read.name, read.weights)
        except ModelError as error:
            self._set(AdapterState(read.name, "failed", reason=str(error)))
        except Exception:  # a file may hold anything, but none may end the process
            logger.exception("an adapter cannot be used", extra={"event": "adapter_unusable"})
            reason = f"The adapter {read.name} cannot be used with this model."
            self._set(AdapterState(read.name, "failed", reason=reason))
        else:
            self._set(AdapterState(read.name, "loaded", read.weights.identity))

    def unload(self, name: str) -> None:
        known = self._states.get(name)
        if known is not None and known.state == "loaded":
            self._set(AdapterState(name, "unloading", known.identity))
        elif known is not None and known.state == "failed":
            self._forget(name)

    def settle(self, in_use: Set[str]) -> None:
        """Removes the adapters that are being unloaded and are used by nobody. It is called between two steps, with
        none in flight."""
        for name in self.leaving - in_use:
            self._runner.remove_adapter(name)
            self._forget(name)

    def take(self) -> tuple[AdapterState, ...] | None:
        """Returns the states of all adapters if anything changed since the last call, else None."""
        if not self._changed:
            return None
        self._changed = False
        return tuple(self._states.values())

    def _set(self, state: AdapterState) -> None:
        self._states[state.name] = state
        self._changed = True

    def _forget(self, name: str) -> None:
        del self._states[name]
        self._changed = True
