"""The equations that `headgate verify-books` checks: the meaning of each, and the result of a check. The module is
pure.

The sentences are owned here. docs/design/metering.md repeats them in its table, and a test compares the two.
"""

from __future__ import annotations

import msgspec

PAGE = "docs/design/metering.md"
SECTION = "13.1"
DOCUMENTED_IN = f"{PAGE}, section {SECTION}"


class Equation(msgspec.Struct, frozen=True):
    """One equation that the books must satisfy."""

    id: str
    name: str
    meaning: str
    """One sentence for an operator, who reads it next to a failure."""


class EquationResult(msgspec.Struct, frozen=True):
    """The result of checking one equation. `failures` names requests, or the rows, days or slots that are wrong."""

    equation: Equation
    num_checked: int
    failures: tuple[str, ...]

    @property
    def id(self) -> str:
        return self.equation.id

    @property
    def name(self) -> str:
        return self.equation.name

    @property
    def ok(self) -> bool:
        return not self.failures


class BooksReport(msgspec.Struct, frozen=True):
    """The results of all equations that were checked together."""

    equations: tuple[EquationResult, ...]

    @property
    def ok(self) -> bool:
        return all(equation.ok for equation in self.equations)


CONSERVATION = Equation(
    "I1",
    "conservation",
    "For each request and class of tokens, what was billed and what was written off add up to what the engine counted.",
)
BALANCE = Equation(
    "I2", "balance", "In every ledger event debits equal credits in each unit, and the legs say what their entry says."
)
ONE_ENDING = Equation(
    "I4",
    "one ending",
    "Every request that the engine worked on or that the ledger names has exactly one settle or void.",
)
WITHIN_RESERVATION = Equation(
    "I5",
    "within reservation",
    "A settle costs at most what was reserved, what takes a charge back is never above 0, and every other entry costs 0.",
)
ROLLUP_TRUTH = Equation(
    "I8",
    "rollup truth",
    "The sums by minute, hour and day equal the sums of their ledger rows, and those by month the sums of their days.",
)
INVOICE_TRUTH = Equation(
    "I9",
    "invoice truth",
    "Invoices add up, no invoice number is missing, and a tenant's invoices hold what its ledger rows and its charges for"
    " kept KV cost when they are priced once more, less what corrections took back and what grants paid.",
)
LIMITER_EQUALS_BOOKS = Equation(
    "I13",
    "limiter equals books",
    "The limiter has used of each budget what the books say, and holds of it what its open requests hold.",
)
JOURNAL_SHIPPED_WHOLE = Equation(
    "I14",
    "journal shipped whole",
    "No gateway's journal is damaged, and every ending in it that counts as shipped is in the ledger as it was written.",
)
TENANCY_CLOSED = Equation(
    "I15",
    "tenancy closed",
    "Every row belongs to a tenant that exists, and refers only to keys, batches and engine records of that tenant.",
)
IDEMPOTENCY = Equation(
    "I17", "idempotency", "Every stored answer of an Idempotency-Key that costs something has a settle."
)
IMMUTABILITY = Equation(
    "I18",
    "immutability",
    "A sealed day holds what was sealed, and every credit is a separate ledger row that never moves more than there was.",
)

ROUNDING = Equation(
    "I19",
    "rounding",
    "Each document asks for whole units of its currency, the remainder that it carries on is what its rounding left over,"
    " and it takes over all that the tenant's documents before it left.",
)

BOUGHT_TOKENS = Equation(
    "I20",
    "bought tokens",
    "What a provider states of a request equals what was judged, or the difference has a name, and no more than that is"
    " billed.",
)
BOUGHT_MONEY = Equation(
    "I21",
    "bought money",
    "Every micro-unit that a provider bills is matched with one call, or stands in a named account.",
)
BOUGHT_DAYS = Equation(
    "I22",
    "bought days",
    "Every micro-unit that a provider bills for a day is matched with the calls of that day, or stands in a named"
    " account, and no statement of the provider about it is missing.",
)
PRICE_IN_FORCE = Equation(
    "I23",
    "price in force",
    "Each settle is priced by a version of the sheet that its tenant paid by, and both were in force when the request"
    " opened, or at most 15 minutes before.",
)
