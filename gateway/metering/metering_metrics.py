"""Metrics of admission, leases, the limiter, the journal, and of what tenants were charged.

The families of tenants have one series for each of the first `MAX_TENANTS` tenants that this process charges. All later
ones share the series `_other`. A tenant keeps its series until the process ends, because a counter must not fall.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from accounting.values import clock
from accounting.values.types import Posting, Tier
from gateway.base.redis_link import RedisLink
from gateway.journal.journal import Journal
from gateway.journal.shipper import Shipper
from gateway.limiter.limits import Limiter, Verdict
from gateway.limiter.rules import BudgetUse, LimitSubject, Rule
from gateway.telemetry.labels import OTHER, FirstSeen, Series

MAX_TENANTS = 100
SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
TIERS: tuple[Tier, ...] = ("interactive", "batch")


class MeteringMetrics:
    def __init__(
        self, registry: CollectorRegistry | None = None, model_label: Callable[[str], str] = lambda _: OTHER
    ) -> None:
        """`model_label` maps a model's name to one of the few values of the label `model`. Without a registry nobody
        reads the metrics.
        """
        self._registry = registry = registry or CollectorRegistry()
        self._model_label = model_label
        self._tenants = FirstSeen(MAX_TENANTS)
        self._series = Series()
        self._charged: dict[tuple[str, str, str], list[Counter]] = {}
        """The series that an ending counts in: tokens by kind, and the charge. The key is tenant, model, currency."""
        self._num_refused = 0
        """The number of endings that SQL refused while the journal took none."""
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self._shadow_refusals = counter(
            "headgate_shadow_refusals",
            "Requests that a limit or budget in shadow mode would have refused.",
            ("level", "dimension"),
        )
        self._tokens = counter("headgate_tokens", "Tokens that were charged for.", ("tenant", "model", "kind"))
        self._charge = counter(
            "headgate_charge_micro_units", "Charges in millionths of the currency.", ("tenant", "currency")
        )
        self._budgets = _Budgets()
        registry.register(self._budgets)
        self._scripts = histogram(
            "headgate_limiter_script_seconds",
            "Time of a limiter script, as its caller sees it.",
            ("script",),
            buckets=SECONDS,
        )
        self._commits = histogram(
            "headgate_journal_commit_seconds", "Time until an ending is durable in the journal.", buckets=SECONDS
        )

    def watch(self, limiter: Limiter, link: RedisLink, journal: Journal, shipper: Shipper) -> None:
        """Shows the state of these objects at each scrape."""
        self._registry.register(_State(limiter, link, journal, shipper, lambda: self._num_refused))

    def shadow_refused(self, limit: Rule | BudgetUse) -> None:
        if isinstance(limit, Rule):
            level, dimension = str(limit.level), str(limit.dimension)
        else:
            level, dimension = limit.budget.scope, "budget_micro_units"
        self._shadow_refusals.labels(level, dimension).inc()

    def reserved(self, holder: LimitSubject, verdict: Verdict) -> None:
        """Notes what the budgets of a request have left."""
        left = []
        for use in holder.budgets:
            money, limit = verdict.money.get(use.row), use.budget.limit_at(holder.opened_ms)
            if money is not None and limit > 0:
                left.append((max(0.0, 1 - (money.used + money.held) / limit), use.period.end_ms))
        self._budgets.note(self._tenants.label(holder.tenant_id), left)

    def charged(self, posting: Posting) -> None:
        if posting.kind != "settle":
            return
        tenant, usage = self._tenants.label(posting.tenant_id), posting.usage
        model = self._model_label(posting.model)
        series = self._charged.get((tenant, model, posting.currency))
        if series is None:
            kinds = ("cache_read", "cache_write", "uncached", "output")
            tokens = [self._tokens.labels(tenant, model, kind) for kind in kinds]
            series = [*tokens, self._charge.labels(tenant, posting.currency)]
            self._charged[tenant, model, posting.currency] = series
        numbers = (usage.cache_read, usage.cache_write, usage.uncached, usage.output, posting.charge.total)
        for one, number in zip(series, numbers, strict=True):
            if number:
                one.inc(number)

    def refused(self) -> None:
        """Notes an ending that went to SQL without the journal, and that SQL will never take."""
        self._num_refused += 1

    def script_ran(self, script: str, seconds: float) -> None:
        self._series.of(self._scripts, script).observe(seconds)

    def committed(self, seconds: float) -> None:
        self._commits.observe(seconds)


class _Budgets(Collector):
    """The share that each tenant's tightest budget had left at its last request, until the budget's period is over."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[float, int]] = {}

    def note(self, tenant: str, left: Sequence[tuple[float, int]]) -> None:
        """`left` has a share and the end of its period, in ms, for each budget of a request."""
        if not left:
            self._left.pop(tenant, None)
        elif tenant != OTHER:
            self._left[tenant] = min(left)

    def collect(self) -> Iterator[Metric]:
        shown = GaugeMetricFamily(
            "headgate_budget_remaining_ratio",
            "Share of the tightest budget that was left at the tenant's last request.",
            labels=["tenant"],
        )
        now_ms = clock.now_ms()
        for tenant, (share, until_ms) in self._left.items():
            if now_ms < until_ms:
                shown.add_metric([tenant], share)
        yield shown


class _State(Collector):
    """The families that are read from their owners at each scrape."""

    def __init__(
        self, limiter: Limiter, link: RedisLink, journal: Journal, shipper: Shipper, num_refused: Callable[[], int]
    ) -> None:
        self._limiter = limiter
        self._link = link
        self._journal = journal
        self._shipper = shipper
        self._num_refused = num_refused

    def collect(self) -> Iterator[Metric]:
        yield from self._of_limiter()
        yield from self._of_journal()

    def _of_limiter(self) -> Iterator[Metric]:
        limiter = self._limiter
        held = Tally(entry.holder.tier for entry in limiter.open_reservations.held.values())
        running = GaugeMetricFamily("headgate_inflight_requests", "Admitted requests that run.", labels=["tier"])
        for tier in TIERS:
            running.add_metric([tier], held[tier])
        yield running
        renewals = CounterMetricFamily(
            "headgate_lease_renewals",
            "Answers to a lease's extension: granted, waits for a window, stopped by a budget, ended, unavailable.",
            labels=["result"],
        )
        for result, number in limiter.renewals.items():
            renewals.add_metric([result], number)
        yield renewals
        yield CounterMetricFamily(
            "headgate_budget_stops", "Streams that a budget ended.", value=limiter.renewals["stopped"]
        )
        yield CounterMetricFamily(
            "headgate_redis_epoch_rebuilds",
            "Limiter states of tenants that were built again after Redis lost them.",
            value=limiter.rebuilder.num_built,
        )
        yield GaugeMetricFamily(
            "headgate_limiter_owed_endings", "Endings that Redis has not confirmed yet.", value=limiter.num_owed
        )
        yield GaugeMetricFamily(
            "headgate_limiter_up",
            "It is 1 while calls are sent to the limiter's Redis, and 0 while that is silent.",
            value=float(self._link.is_open),
        )

    def _of_journal(self) -> Iterator[Metric]:
        journal, shipper = self._journal, self._shipper
        yield GaugeMetricFamily(
            "headgate_journal_full", "It is 1 while the disk of the journal is full.", value=float(journal.is_full)
        )
        poisoned = not journal.is_writable and not journal.is_full
        yield GaugeMetricFamily(
            "headgate_journal_poisoned",
            "It is 1 while the disk of the journal fails in another way.",
            value=float(poisoned),
        )
        yield GaugeMetricFamily(
            "headgate_journal_unshipped_records",
            "Durable records of the journal that SQL does not have.",
            value=shipper.num_unshipped,
        )
        yield GaugeMetricFamily(
            "headgate_journal_ship_lag_seconds",
            "Age of the oldest durable record that SQL does not have.",
            value=shipper.lag_s,
        )
        yield CounterMetricFamily(
            "headgate_refused_postings",
            "Endings of requests that SQL will never take, and that nobody is charged for.",
            value=shipper.num_refused + self._num_refused(),
        )
