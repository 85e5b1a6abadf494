"""The output of `headgate up` once everything serves: URL, keys (on the first start only), ready snippets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from accounting.values.tenant_types import Credentials

QUESTION = "What does json.dumps do?"


def banner(
    base_url: str, models: Sequence[str], credentials: Credentials, home: Path, price_notes: Sequence[str] = ()
) -> str:
    """The snippets use the first model."""
    model = models[0]
    return "\n".join(
        [
            "",
            "Headgate is ready.",
            f"  base URL    {base_url}/v1",
            f"  console     {base_url}/console",
            *(f"  model       {name}" for name in models),
            *(f"  price       {note}" for note in price_notes),
            f"  state       {home}",
            *_keys(credentials),
            "",
            *_curl(base_url, model, credentials),
            "",
            *_openai(base_url, model, credentials),
            "",
            "Ctrl-C drains and stops; nothing is lost.",
        ]
    )


def _keys(credentials: Credentials) -> list[str]:
    if not credentials.fresh:
        return ["  API key     as shown at the first start (credentials.json of the state directory keeps it)"]
    return [
        f"  API key     {credentials.api_key}    (tenant `default`; shown this once)",
        f"  admin key   {credentials.admin_key}    (operator; runs no inference; shown this once)",
    ]


def _curl(base_url: str, model: str, credentials: Credentials) -> list[str]:
    key = credentials.api_key if credentials.fresh else "$HEADGATE_API_KEY"
    body = (
        f'{{"model": "{model}", "messages": [{{"role": "user", "content": "{QUESTION}"}}], '
        '"max_tokens": 64, "stream": true}'
    )
    return [
        f"  curl -N {base_url}/v1/chat/completions \\",
        f'    -H "Authorization: Bearer {key}" -H "Content-Type: application/json" \\',
        f"    -d '{body}'",
    ]


def _openai(base_url: str, model: str, credentials: Credentials) -> list[str]:
    key = f'"{credentials.api_key}"' if credentials.fresh else 'os.environ["HEADGATE_API_KEY"]'
    return [
        *([] if credentials.fresh else ["  import os"]),
        "  from openai import OpenAI",
        f'  client = OpenAI(base_url="{base_url}/v1", api_key={key})',
        f'  reply = client.chat.completions.create(model="{model}", max_tokens=64,',
        f'      messages=[{{"role": "user", "content": "{QUESTION}"}}])',
        "  print(reply.choices[0].message.content, reply.usage)",
    ]
