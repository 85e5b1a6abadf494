"""The forms of settings that several processes and commands take: addresses, URLs, keys, counts and choices. It is pure.

Each check returns the value, or raises ValueError with what was expected. The settings classes have the checks in the
types of their fields. `COMMANDS` has those of the settings that no class reads, so that `headgate config check` and every
start refuse the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated
from urllib.parse import urlsplit

import pydantic

Check = Callable[[str], str]

_UNSET = re.compile(
    r"HEADGATE_(?:(?:.+_)?(?:URL|BIND|ADDRESS)|HOST|API_KEY|MODEL)|OTEL_EXPORTER_OTLP_(?:TRACES_)?ENDPOINT"
)
_NAME = re.compile(r"[A-Za-z0-9_.%-]+|\[[0-9A-Fa-f:.%]+\]|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*")
_DATABASE = re.compile(
    r"postgresql\+psycopg://(?:[^:/?]*(?::[^@]*)?@)?(?:\[[^\]/?]+\]|[^:/?\[\]]*)(?::(\d*))?(?:/[^?]*)?(?:\?.*)?"
)
_BROKERS = ("amqp", "amqps", "pyamqp", "redis", "rediss", "redis+socket", "sentinel", "memory")
MAX_PORT = 65_535
UNIX_URL = "unix:///"
"""The beginning of a URL that is a socket of this machine."""


def given(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment without the URLs, addresses, keys and models that are empty: these count as not set."""
    return {name: value for name, value in environ.items() if is_given(name, value)}


def is_given(name: str, value: str) -> bool:
    return bool(value) or not _UNSET.fullmatch(name)


def named(value: object) -> object:
    """Refuses an empty path, which would be the current directory."""
    if value == "":
        raise ValueError("must not be empty")
    return value


def all_or_none(**settings: object) -> None:
    """Refuses settings that need each other, if some of them are given. Raises ValueError."""
    given = [name for name, value in settings.items() if value is not None]
    if given and len(given) < len(settings):
        first, *others = settings
        raise ValueError(f"{first} and {' and '.join(others)} need each other")


def of_links(ca: object, cert: object, key: object, *, is_plain: bool) -> None:
    """Refuses settings for links between gateways and workers that do not fit each other. Raises ValueError."""
    all_or_none(HEADGATE_LINK_CA=ca, HEADGATE_LINK_CERT=cert, HEADGATE_LINK_KEY=key)
    if ca is not None and is_plain:
        raise ValueError(
            "HEADGATE_LINK_PLAIN has no meaning beside HEADGATE_LINK_CA: with certificates links speak TLS"
        )


def host(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError("it should be a host name or an address, such as 127.0.0.1")
    return value


def count(lowest: int, highest: int | None = None) -> Check:
    def check(value: str) -> str:
        number = int(value) if re.fullmatch(r"[+-]?\d{1,18}", value.strip()) else None
        if number is None or number < lowest or (highest is not None and number > highest):
            raise ValueError(
                f"it should be a whole number from {lowest} on"
                if highest is None
                else f"it should be a whole number from {lowest} to {highest}"
            )
        return value

    return check


def choice(*known: str) -> Check:
    def check(value: str) -> str:
        if value not in known:
            raise ValueError(f"it should be {' or '.join(known)}")
        return value

    return check


def bind(value: str) -> str:
    """Checks an address to listen on; an empty one is left to the process."""
    name, _, port = value.rpartition(":")
    if value and not (_NAME.fullmatch(name) and _is_port(port)):
        raise ValueError(f"it should be host:port, such as 127.0.0.1:8080, with a port of at most {MAX_PORT}")
    return value


def worker_address(value: str) -> str:
    """Checks the address at which gateways reach a worker; an empty one is left to the process."""
    name, _, port = value.removeprefix("tcp:").rpartition(":")
    is_tcp = value.startswith("tcp:") and name and _is_port(port)
    if value and not is_tcp and not re.fullmatch(r"unix:/.+", value):
        raise ValueError(f"it should be unix:/path, or tcp:host:port with a port of at most {MAX_PORT}")
    return value


def api_key(value: str) -> str:
    """Checks a key that a command sends as a header."""
    if not re.fullmatch(r"[!-~]+", value):
        raise ValueError("it should be a key without spaces, line breaks and letters beyond ASCII: copy it once more")
    return value


def database_url(value: str) -> str:
    found = _DATABASE.fullmatch(value)
    if not (found and (not found[1] or _is_port(found[1]))) and not re.match(r"sqlite\+aiosqlite:///.", value):
        raise ValueError(
            "it should name a database, like postgresql+psycopg://user:password@host/database or"
            " sqlite+aiosqlite:///path"
        )
    return value


def redis_url(value: str) -> str:
    """Checks the URL of a Redis or Valkey; an empty one is left to the process."""
    if value and not _is_redis(value):
        raise ValueError("it should be redis://host:port/db, rediss://host:port/db or unix:///path")
    return value


def broker_url(value: str) -> str:
    for one in value.split(";"):
        scheme, mark, rest = one.partition("://")
        is_right = mark and scheme in _BROKERS and (scheme != "redis+socket" or rest.startswith("/"))
        if not is_right or (scheme in ("redis", "rediss") and not _is_redis(one)) or _port(one) is None:
            raise ValueError(
                "it should be redis://host:port/db, redis+socket:///path?virtual_host=1 or amqp://user:password@host//"
            )
    return value


def base_url(value: str) -> str:
    if not _has_host(value, "http", "https"):
        raise ValueError("it should begin with http:// or https:// and name a host, like http://127.0.0.1:8080")
    return value


def gateway_url(value: str) -> str:
    """Checks the URL of the gateways, which may also be a unix socket of theirs."""
    if not re.fullmatch(rf"{UNIX_URL}[^\s]+", value) and not _has_host(value, "http", "https"):
        raise ValueError(
            "it should begin with http:// or https:// and name a host, like http://127.0.0.1:8080, or be unix:///path"
        )
    return value


def smtp_url(value: str) -> str:
    if not _has_host(value, "smtp", "smtps"):
        raise ValueError("it should begin with smtp:// or smtps:// and name a host, like smtp://user:password@host:587")
    return value


Bind = Annotated[str, pydantic.AfterValidator(bind)]
WorkerAddress = Annotated[str, pydantic.AfterValidator(worker_address)]
DatabaseUrl = Annotated[str, pydantic.AfterValidator(database_url)]
RedisUrl = Annotated[str, pydantic.AfterValidator(redis_url)]
BrokerUrl = Annotated[str, pydantic.AfterValidator(broker_url)]
GatewayUrl = Annotated[str, pydantic.AfterValidator(gateway_url)]
SmtpUrl = Annotated[str, pydantic.AfterValidator(smtp_url)]

OF_ALL: Mapping[str, Check] = {
    "HEADGATE_LOG_FORM": choice("text", "json"),
    "OTEL_EXPORTER_OTLP_ENDPOINT": base_url,
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": base_url,
}
"""The settings that processes read outside of their settings classes."""
COMMANDS: Mapping[str, Check] = {
    "HEADGATE_HOST": host,
    "HEADGATE_PORT": count(0, MAX_PORT),
    "HEADGATE_GATEWAYS": count(1, 64),
    "HEADGATE_THREADS": count(1),
    "HEADGATE_ENGINE_TENSOR_PARALLEL": count(1, 64),
    "HEADGATE_URL": gateway_url,
    "HEADGATE_API_KEY": api_key,
    "HEADGATE_DATABASE_URL": database_url,
    "HEADGATE_REDIS_URL": redis_url,
    "HEADGATE_BROKER_URL": broker_url,
    **OF_ALL,
}
"""The settings that the `headgate` command takes, most of them in place of a flag."""


def _is_port(text: str) -> bool:
    return bool(re.fullmatch(r"[0-9]{1,5}", text)) and int(text) <= MAX_PORT


def _port(url: str) -> int | None:
    """Returns the port of a URL, 0 if it names none, or None if it cannot be read."""
    try:
        return urlsplit(url).port or 0
    except ValueError:
        return None


def _has_host(url: str, *schemes: str) -> bool:
    if re.search(r"\s", url) or _port(url) is None:
        return False
    parts = urlsplit(url)
    return parts.scheme in schemes and bool(parts.hostname)


def _is_redis(url: str) -> bool:
    if re.search(r"\s", url) or _port(url) is None:
        return False
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return len(parts.path) > 1
    return parts.scheme in ("redis", "rediss") and bool(re.fullmatch(r"(/\d*)?", parts.path))
