"""The state of a gateway's dependencies: SQL, the limiter's Redis, the journal's disk, each model's workers.

One task asks Redis every two seconds. A probe reads the known state and costs nothing, however often it comes. It knows no
HTTP, no tenant and no key; of models only their ids.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import redis.asyncio
from prometheus_client import Metric
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector
from redis.exceptions import RedisError

from gateway.base.checks import CLOCK_APART_S, MODEL, Check, State, clocks_apart, redis_fault
from gateway.http.auth import Authenticator
from gateway.journal.journal import Journal
from gateway.journal.shipper import Shipper
from gateway.metering.slot_owner import KEPT_S, SlotOwner
from gateway.routing.links.worker_link import WorkerLink, WorkerState
from workers.process.rounds import heed_cancellation
from workers.process.tls.certificates import Certificate, moment
from workers.protocol.registry import Registration

EVERY_S = 2.0
STATES: dict[State, float] = {"ok": 0.0, "degraded": 1.0, "failing": 2.0}
SILENT_S = 6.0
"""The time after which SQL counts as not answering. SQL is asked every 2 s, and this is later than any slow answer."""


WHY: dict[WorkerState, str] = {
    "other_tokenizer": "Its workers have another tokenizer than the one that this gateway has read.",
    "disk_full": "The disk of its workers is full.",
    "draining": "Its workers are draining.",
    "silent": "Its workers do not answer.",
}
"""Why a model's workers take no requests. Of several reasons the first is told."""


def of_models(vocabularies: Mapping[str, str], links: Collection[WorkerLink]) -> list[Check]:
    """Returns one check per model, `failing` if no worker would take a request for it. The models come with the digests
    of the vocabularies that this gateway has of them.
    """
    return [
        _of_model(model, {link.state(vocabulary) for link in links if link.registration.model == model})
        for model, vocabulary in vocabularies.items()
    ]


def _of_model(model: str, states: Collection[WorkerState]) -> Check:
    if "ready" in states:
        return Check(MODEL + model)
    why = next((said for state, said in WHY.items() if state in states), "No worker of this model is linked.")
    return Check(MODEL + model, "failing", why)


def of_refused(refused: Collection[Registration]) -> Check:
    """Checks that no registered worker is refused, also one of a model that this gateway does not serve."""
    if not refused:
        return Check("workers")
    return Check("workers", "degraded", "A registered worker is refused: `headgate workers list` says why.")


def of_disk(journal: Journal) -> Check:
    """Checks the journal's disk."""
    if journal.is_writable:
        return Check("disk")
    if journal.is_full:
        return Check("disk", "failing", "The disk of the journal is full: make room on it.")
    return Check("disk", "failing", "The disk of the journal fails: see the log.")


def of_certificates(certificates: Mapping[str, Certificate]) -> list[Check]:
    """Checks that certificates can be read and last longer than a week. They come with what they are for."""
    return [Check(f"certificate:{use}", *_of_certificate(one)) for use, one in certificates.items()]


def _of_certificate(one: Certificate) -> tuple[State, str]:
    if one.fault:
        return "degraded", "The new certificate cannot be used, so the one before is: see the log."
    if one.has_ended:
        return "degraded", "The certificate has ended: nobody who checks it connects any more."
    if not one.has_begun:
        return (
            "degraded",
            f"The certificate is not valid before {moment(one.begins_at)}: nobody who checks it connects.",
        )
    return ("degraded", "The certificate ends within a week.") if one.ends_soon else ("ok", "")


def of_database(auth: Authenticator, shipper: Shipper) -> Check:
    """Checks SQL. While SQL does not answer, remembered keys are served for ten minutes."""
    if shipper.has_failed:
        return Check("database", "failing", "Charges are not brought into the database any more: see the log.")
    if shipper.is_full:
        return Check("database", "failing", "The database has taken no charges for too long.")
    if auth.silent_s > SILENT_S:
        state: State = "degraded" if auth.serves_without_sql else "failing"
        return Check("database", state, "The database does not answer.")
    if shipper.is_failing:
        return Check("database", "degraded", "The database takes no charges; they wait on disk.")
    return Check("database")


@dataclass(frozen=True)
class Asked:
    """The last result of Redis: why it cannot be used, or how far its clock is ahead of ours."""

    fault: str = ""
    ahead_s: float = 0.0


def of_limiter(asked: Asked) -> list[Check]:
    if asked.fault:
        return [Check("limiter", "failing", asked.fault)]
    if abs(asked.ahead_s) <= CLOCK_APART_S:
        return [Check("limiter"), Check("clock")]
    return [Check("limiter"), Check("clock", "degraded", clocks_apart(asked.ahead_s))]


class ReadinessMetrics(Collector):
    """The checks as metrics, for alerts that say what is missing."""

    def __init__(self, checks: Callable[[], Iterable[Check]]) -> None:
        self._checks = checks

    def collect(self) -> Iterator[Metric]:
        state = GaugeMetricFamily(
            "headgate_check_state", "A check of /readyz: 0 in order, 1 degraded, 2 failing.", labels=["check"]
        )
        for check in self._checks():
            state.add_metric([check.name], STATES[check.state])
        yield state


class RedisProbe:
    """Tells Redis every two seconds who runs in the slot, and reads its clock."""

    def __init__(
        self, client: redis.asyncio.Redis, owner: SlotOwner, *, clock: Callable[[], float] = time.time
    ) -> None:
        self.asked = Asked()
        self._client = client
        self._owner = owner
        self._clock = clock

    async def run(self) -> None:
        """Runs until it is cancelled."""
        while True:
            self.asked = await self.ask()
            heed_cancellation()
            await asyncio.sleep(EVERY_S)

    async def ask(self) -> Asked:
        try:
            asked = self._client.pipeline(transaction=False)
            _ = asked.set(self._owner.key, self._owner.id, ex=KEPT_S), asked.time()  # both are sent at once
            before = self._clock()
            _, (seconds, microseconds) = await asked.execute()
        except (RedisError, OSError, TimeoutError) as error:
            return Asked(redis_fault(error))
        ours = (before + self._clock()) / 2
        return Asked(ahead_s=seconds + microseconds / 1e6 - ours)
