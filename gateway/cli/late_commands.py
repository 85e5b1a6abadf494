"""The commands that are imported when they are asked for, by module, each with what `headgate --help` says of it. So help
loads none of them: many load an HTTP client, and some SQLAlchemy. A test compares the sentences with the commands' own."""

from __future__ import annotations

MODULES: dict[str, dict[str, str]] = {
    "tenant_commands": {
        "tenants": "Create, show, change, suspend, archive and delete tenants.",
        "keys": "Create, show, change, rotate and revoke API keys.",
        "audit": "Read the audit log: every change by API or command line, which nobody can edit.",
        "anomalies": "List keys that do what they never did.",
    },
    "limit_commands": {
        "limits": "Show and change the limits of tenants, for one model or over all models, and what they may spend.",
        "models-permissions": "Choose the models that all keys of a tenant may use, in addition to each key's own list.",
        "quotas": "Set limits in addition to those of `headgate limits`: per day, for input and output separately, per end user.",
        "budgets": "Limit what tenants and keys may spend.",
    },
    "money_commands": {
        "prices": "Manage price sheets: rates in the currency per million tokens, in force from a moment on.",
        "invoice": "Close a month into invoices, and read them.",
        "credits": "Give prepaid grants, and correct charged requests.",
    },
    "billing_commands": {
        "issuer": "Show and change who issues invoices.",
        "billing": "Show and change how a tenant is billed: its address, its tax, its terms of payment.",
    },
    "serving_commands": {
        "prefixes": "Publish system prompts: each worker computes them once, and every tenant finds them in the cache.",
        "adapters": "Serve LoRA adapters of a model, as MODEL:NAME.",
        "webhooks": "Tell other programs of budget alerts, usage, invoices, keys and batches, by signed POSTs.",
        "workers": "See the workers that are linked with the gateway, drain one, and take that back.",
        "upstreams": "Let servers of others answer for models: any with OpenAI's API, Anthropic, Azure.",
    },
    "reports": {
        "usage": "Report the numbers of requests and tokens by time, and by tenant, key, model, tier or currency.",
        "costs": "Report the charges by day, and by tenant, key or line item.",
    },
    "usage_changes": {"usage-changes": "Say why the charge of TENANT changed between two periods, first cause first."},
    "config_commands": {"config": "Look at headgate.toml and at the settings in force."},
    "reload": {
        "reload": "Serve the models that headgate.toml names now: new ones are loaded, those that are gone are drained."
    },
    "maintenance": {
        "verify-books": "Check that every engine token is a tenant's or a write-off, and every sum is the sum of its rows.",
        "journals": "Manage the journals: files of gateways and workers that are written before the books are.",
    },
    "backup": {
        "backup": "Write the database, secrets, journals and files of this home into one file, also while Headgate runs.",
        "restore": "Make a home of a backup, upgrade its database to this version, and verify its books.",
    },
    "secret_rotation": {"secrets": "Replace the key files of a home."},
    "certificates": {
        "certificates": "Make an authority in DIRECTORY, unless it is there, and certificates that it signs."
    },
    "model_tools": {
        "plan": "Compute how much memory a model needs, what fits on a device, and how fast it can be.",
        "calibrate": "Measure a model's largest activations, for smoothing before they are rounded.",
    },
    "requests": {"requests": "Read the request log: every request of a known key, refused ones too."},
    "rerate": {"rerate": "Compute what a month would have cost under another price sheet, line by line."},
    "export": {"export": "Write rows of the books as files for other programs."},
    "status": {"status": "Say what runs, where, since when, and whether it is healthy."},
    "top": {
        "top": "Show who is served now: tenants with their shares and waits, workers with their queues and caches."
    },
    "doctor": {"doctor": "Check the settings, ports, versions, database, Redis, clock, disk and GPU."},
    "chat": {"chat": "Talk with a model."},
    "batch_commands": {"batches": "Submit, follow, cancel and retry batches."},
    "completion": {"completion": "Print the script with which SHELL completes the words of this command."},
}

LATE_COMMANDS = {name: module for module, names in MODULES.items() for name in names}
SUMMARIES = {name: summary for names in MODULES.values() for name, summary in names.items()}
