"""`/admin/v1/workers`: the workers that this gateway is linked with, and their drain. Operator keys only.

Every gateway is linked with every worker, and a worker tells all of them the same. Only the requests that a gateway
has sent are its own.
"""

from __future__ import annotations

from typing import Any, Literal

from aiohttp import web

from accounting.database import audit
from gateway.base import errors
from gateway.base.app_keys import SETTINGS
from gateway.generation.served.models import MODELS
from gateway.generation.stream import GENERATION
from gateway.http.sql import writing
from gateway.routes.admin import part, route, who
from gateway.routing.links.trust import LinkDown
from gateway.routing.links.worker_link import WorkerLink
from gateway.schema import workers as shapes
from gateway.schema.organization import listing, reply

PATH = "/admin/v1/workers"
ONE = f"{PATH}/{{worker_id}}"


async def list_all(request: web.Request) -> web.Response:
    """Lists the linked workers, and those that are registered and cannot be reached."""
    found = listing([shapes.worker(_told(request, link)) for link in _links(request)], has_more=False)
    fleet = request.app[GENERATION].fleet
    unreachable = [shapes.registered(one, fleet.refusals.get(one.worker)) for one in fleet.unreachable]
    return reply(found | {"unreachable": unreachable} | _answered_by(request))


async def get(request: web.Request) -> web.Response:
    """Shows one worker with its last steps, its tenants, its kernels, its recorded steps and its evictions."""
    link = _link(request)
    return reply(shapes.worker_in_detail(_told(request, link), link.adapters.values()) | _answered_by(request))


async def drain(request: web.Request) -> web.Response:
    """Lets a worker finish what runs and take nothing new, until `resume` or a start of its process."""
    link = await _told_to(request, "drained")
    others = [_told(request, one) for one in _links(request) if one is not link]
    return reply(shapes.drained(link.registration, link.status, others))


async def resume(request: web.Request) -> web.Response:
    """Takes a drain back: the worker takes requests again, unless its process was told to end."""
    link = await _told_to(request, "resumed")
    return reply({"id": link.registration.worker, "object": "worker.resume", "running": link.status.running})


async def _told_to(request: web.Request, deed: Literal["drained", "resumed"]) -> WorkerLink:
    link = _link(request)
    if deed == "resumed" and not (link.hello and link.hello.takes_over):
        raise errors.conflict(
            "This worker is of a version that takes no drain back. Start it anew.", "worker_not_resumable"
        )
    async with writing(request, changes_identities=False) as conn:
        await audit.record(conn, f"headgate.worker.{deed}", **who(request), object_id=link.registration.worker)
        try:
            link.drain(taken_back=deed == "resumed")
        except LinkDown:
            raise errors.conflict("This worker is gone. Send SIGTERM to its process.", "worker_not_drainable") from None
    return link


def _links(request: web.Request) -> list[WorkerLink]:
    return sorted(request.app[GENERATION].fleet.links, key=lambda link: link.registration.worker)


def _link(request: web.Request) -> WorkerLink:
    wanted = part(request, "worker_id")
    for link in _links(request):
        if link.registration.worker == wanted:
            return link
    raise errors.not_found("No such worker is linked with this gateway.")


def _told(request: web.Request, link: WorkerLink) -> shapes.LinkedWorker:
    assert link.hello is not None, "only links that are up are listed"
    state = link.state(request.app[MODELS].vocabularies.get(link.registration.model, ""))
    return shapes.LinkedWorker(link.registration, link.hello, link.status, link.report, state, link.num_calls)


def _answered_by(request: web.Request) -> dict[str, Any]:
    """Names the gateway process that answered, by its slot."""
    return {"gateway": request.app[SETTINGS].slot}


ROUTES = [
    route("GET", PATH, list_all),
    route("GET", ONE, get),
    route("POST", f"{ONE}/drain", drain),
    route("POST", f"{ONE}/resume", resume),
]
