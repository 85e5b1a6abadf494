"""The Celery application: its settings and their reasons. The module knows no task and no SQL.

A message that is lost, doubled or late costs at most one sweep, as all state is in SQL.
"""

from __future__ import annotations

import warnings
from typing import Any

from celery import Celery
from celery.exceptions import CPendingDeprecationWarning, SecurityWarning
from kombu.entity import Queue

from accounting.batches.batches import QUEUE
from workers.jobs.base.settings import HARD_LIMIT_S, SOFT_LIMIT_S, VISIBILITY_TIMEOUT_S, JobsSettings


def create_celery(settings: JobsSettings) -> Celery:
    # This order keeps one chunk from running twice in parallel (celery #5935). A batch may take longer: its message then
    # comes to a second child, which finds a live claim.
    assert settings.chunk_s <= 120 < SOFT_LIMIT_S < HARD_LIMIT_S < VISIBILITY_TIMEOUT_S
    app = Celery("headgate.jobs", broker=settings.broker_url, set_as_current=False)
    app.conf.update(CONFIG, worker_soft_shutdown_timeout=settings.drain_s)
    return app


def leave_out_advice() -> None:
    """Keeps warnings of Celery out of the log that no operator can act on: that it runs as root, as containers do, where
    it takes no pickle; and what a later version will do. Celery's own start lets the latter in, so this is called
    before it and after it.
    """
    for category in (SecurityWarning, CPendingDeprecationWarning):
        warnings.filterwarnings("ignore", category=category)


CONFIG: dict[str, Any] = {
    # Messages: JSON only, no pickle anywhere; state is in SQL.
    "task_serializer": "json",
    "accept_content": ["json"],
    "task_ignore_result": True,
    "task_queues": [Queue(QUEUE)],  # type: ignore[no-untyped-call]
    "task_default_queue": QUEUE,
    # After a crash a second message comes quickly. It is harmless, as its receiver finds a live claim.
    "task_acks_late": True,
    "task_reject_on_worker_lost": True,
    # Failures are in SQL already.
    "task_acks_on_failure": True,
    # Children limit their own time (`time_limit.py`): what is large may take long while it gets on.
    "task_soft_time_limit": None,
    "task_time_limit": None,
    # It is set in every place, as the shortest value of all applications on the broker wins.
    "visibility_timeout": VISIBILITY_TIMEOUT_S,
    "result_backend_transport_options": {"visibility_timeout": VISIBILITY_TIMEOUT_S},
    "broker_transport_options": {
        "visibility_timeout": VISIBILITY_TIMEOUT_S,
        # By default such messages are looked for only about every 100 s.
        "unacked_restore_interval": 10,
        "unacked_restore_throttle": 1,
        "socket_timeout": 10,
        "socket_connect_timeout": 10,
        "socket_keepalive": True,
        "health_check_interval": 10,
    },
    # A message must not wait behind a long chunk.
    "worker_prefetch_multiplier": 1,
    "worker_disable_prefetch": True,
    # A chunk needs no broker, and a broker's restart must not count as a crash.
    "worker_cancel_long_running_tasks_on_connection_loss": False,
    # Memory leaks were fixed as late as Celery 5.6.
    "worker_max_tasks_per_child": 500,
    "worker_max_memory_per_child": 400_000,
    "broker_connection_retry_on_startup": True,
    "broker_connection_max_retries": None,
    # The console reads SQL, so it needs no task events.
    "worker_send_task_events": False,
    "worker_hijack_root_logger": False,
    "worker_enable_remote_control": False,
    # Seconds until a new child counts as stuck and is killed. On a busy machine a fork alone may take Celery's four.
    "worker_proc_alive_timeout": 60,
}
