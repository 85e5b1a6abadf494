"""Errors of accounting. They have no HTTP status: `gateway/base/errors.py` maps these classes to answers."""

from __future__ import annotations


class AccountingError(Exception):
    """The base class. The message is one clear sentence that may be shown to an operator."""


class NotFoundError(AccountingError):
    """There is no such object, or it belongs to another tenant: the error does not say which."""


class InvalidError(AccountingError):
    """A value is out of its range. `param` names the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ConflictError(AccountingError):
    """The object's state forbids the operation, as for an archived tenant or an overlapping price interval."""


class NotAllowedError(AccountingError):
    """The caller may not do this to the object, although it may do it to others."""


class NoRoomError(AccountingError):
    """The tenant's files would take more bytes than its quota."""


class TooManyError(AccountingError):
    """The tenant has as many of these at once as it may have: one of them has to end first."""


class NameTakenError(ConflictError):
    """Another object has the name, and is found by it."""


class KeyReusedError(AccountingError):
    """An Idempotency-Key was used for another request before."""


class DatabaseUrlError(AccountingError, ValueError):
    """The database URL cannot be read, or names a database that is not served."""


class DatabaseUnreachable(AccountingError):
    """The database cannot be reached."""


class SchemaError(AccountingError):
    """Database and code do not match."""


class SchemaOlder(SchemaError):
    """The database is older than the code and needs `headgate migrate`."""


class SchemaNewer(SchemaError):
    """The database was migrated by a newer Headgate."""
