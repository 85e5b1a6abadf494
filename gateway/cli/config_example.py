"""The text of `headgate config example`: every setting with a value that can be used, all of them commented out.

A default that is no value, such as "all cores", has an example in place of it. A setting that is refused without another one
is described and has no line of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from accounting.values import setting_rows
from accounting.values.setting_rows import Row
from gateway.base.settings import PREFIX
from gateway.configuration.file import OF_ONE_PROCESS

_OF_MODELS = {
    "path": '"Qwen/Qwen3-0.6B"',
    "max_output_tokens": "4096",
    "max_model_len": "8192",
    "aliases": "[]",
    "fallbacks": "[]",
    "tool_format": '"hermes"',
    "reasoning_format": '"think"',
    "price": "{ input = 0.10, output = 0.40 }",
}
_EXAMPLES = {
    "url": '"http://127.0.0.1:8080"',
    "url_ca": '"/etc/headgate/ca.pem"',
    "api_key": '"hg_admin_..."',
    "threads": "4",
    "database_url": '"postgresql+psycopg://headgate:password@127.0.0.1/headgate"',
    "redis_url": '"redis://127.0.0.1:6379/0"',
    "broker_url": '"redis://127.0.0.1:6379/1"',
    "log_form": '"text"',
    "traceback": '"1"',
    "state_dir": '"/var/lib/headgate/state"',
    "upstreams": '{ provider = { url = "https://provider.example/v1", key_env = "PROVIDER_KEY", models = { large = {} } } }',
    "trace_parent_from": "[]",
    "trusted_networks": "[]",
    "cors_origins": "[]",
    "webhook_allowed_networks": "[]",
    "smtp_url": '"smtp://user:password@mail.example:587"',
    "engine_smoothing": '"/models/statistics.safetensors"',
    "engine_adapters": '"/models/adapters"',
    "engine_max_adapters": "8",
    "engine_num_blocks": "4096",
    "engine_kv_memory": "8589934592",
    "engine_max_model_len": "8192",
    "engine_shared_cache_secret": '"/etc/headgate/shared_cache.key"',
}
_WITH_ANOTHER = {
    "tls_cert": 'It is a path, such as "/etc/headgate/tls/fullchain.pem", and needs tls_key.',
    "tls_key": 'It is a path, such as "/etc/headgate/tls/privkey.pem", and needs tls_cert.',
    "link_ca": 'It is a path, such as "/etc/headgate/ca.pem", and needs the variables HEADGATE_LINK_CERT and HEADGATE_LINK_KEY.',
    "engine_kv_budget": 'It is a number of tokens, such as 1024, and needs engine_kv_sparsity, such as "heavy".',
    "engine_heads": 'It is a path, and needs engine_speculate to be "heads".',
}


def lines() -> Iterator[str]:
    """Yields the lines. Tables are at the end, because a name below a table's head would belong to the table."""
    yield "# Settings of Headgate. A variable HEADGATE_NAME wins over `name` of this file, and a flag over both."
    yield "# `headgate config check` says whether this file can be used. Restart after a change; models alone are read again"
    yield "# by `headgate reload`."
    process = ""
    rows = setting_rows.read()
    for row in rows:
        if row.name in OF_ONE_PROCESS or not row.name.startswith(PREFIX):
            continue
        if row.process != process:
            process = row.process
            yield f"\n# --- {process} ---"
        name = row.name.removeprefix(PREFIX).lower()
        yield f"\n# {row.text}"
        yield f"# {name}: {_WITH_ANOTHER[name]}" if name in _WITH_ANOTHER else f"# {name} = {_value(name, row)}"
    yield "\n# --- Models ---"
    yield "\n# Each model has a table, whose name is what clients put into `model`."
    yield "# [models.demo]"
    for row in rows:
        if row.process == "Models":
            yield f"# {row.name} = {_OF_MODELS.get(row.name, row.default)}  # {row.text}"
    yield "# engine_max_running = 64  # Any setting of workers that begins with engine_, for this model alone."


def _value(name: str, row: Row) -> str:
    if name in _EXAMPLES:
        return _EXAMPLES[name]
    if row.default in ("true", "false"):
        return row.default
    try:
        float(row.default)
    except ValueError:
        return json.dumps("" if row.default == "unset" else row.default)
    return row.default
