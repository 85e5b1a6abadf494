"""What accounting refuses. No HTTP status here: `gateway/base/errors.py` maps these classes to answers."""

from __future__ import annotations


class AccountingError(Exception):
    """Base: the message is one clear sentence that may be shown to an operator."""


class NotFoundError(AccountingError):
    """No such object, or one of another tenant: the two are not told apart."""


class InvalidError(AccountingError):
    """A value out of its range. `param` names the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ConflictError(AccountingError):
    """The object's state forbids it: archived tenant, overlapping price interval."""


class NoRoomError(AccountingError):
    """The tenant's files would take more room than its quota."""


class NameTakenError(ConflictError):
    """Another object has the name, and is found by it."""


class KeyReusedError(AccountingError):
    """An Idempotency-Key that stands for another request."""


class DatabaseUrlError(AccountingError, ValueError):
    """The database URL cannot be read, or names a database that is not served."""


class DatabaseUnreachable(AccountingError):
    """Nothing can be asked of the database."""


class SchemaError(AccountingError):
    """Database and code do not fit together."""


class SchemaOlder(SchemaError):
    """The database waits for `headgate migrate`."""


class SchemaNewer(SchemaError):
    """The database was migrated by a newer Headgate."""
