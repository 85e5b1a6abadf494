"""The fault of a schema."""

from __future__ import annotations


class SchemaError(ValueError):
    """A schema that cannot be enforced. `pointer` is the place, as a JSON pointer."""

    def __init__(self, pointer: str, message: str) -> None:
        super().__init__(message)
        self.pointer = pointer
