"""The playground: one message to a model, its answer as it comes, and what the answer cost."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from gateway.base import errors
from gateway.console import pages
from gateway.console.calls import Refused
from gateway.console.screens.traffic.requests import models_of
from gateway.console.viewer import Viewer

CHAT = "/v1/chat/completions"
MAX_TOKENS = 256
Form = Mapping[str, str]


async def ask(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    """Answers a form whose browser has no script: the page comes when the answer is complete."""
    form = await pages.fields_of(request)
    began = time.monotonic()
    try:
        answer = await viewer.post(CHAT, body_of(form))
    except (Refused, errors.ApiError) as refused:
        if refused.status == 401:
            raise
        return await show_form(request, viewer, form, message=refused.message)
    usage, headgate = answer["usage"], answer["headgate"]
    facts = {
        "request_id": headgate["request_id"],
        "seconds": time.monotonic() - began,
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "charge_micro_units": headgate["charge_micro_units"],
        "currency": headgate["currency"],
    }
    return await show_form(
        request, viewer, form, body=body_of(form), text=answer["choices"][0]["message"]["content"], facts=facts
    )


async def show_code(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    """Shows the form's request as commands for elsewhere, and sends nothing."""
    form = await pages.fields_of(request)
    return await show_form(request, viewer, form, body=body_of(form))


async def stream(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    """Sends the answer as it comes, as the API streams it."""
    form = await pages.fields_of(request)
    body = body_of(form) | {"stream": True, "stream_options": {"include_usage": True}}
    return await viewer.forward("POST", CHAT, json.dumps(body).encode())


def body_of(form: Form) -> dict[str, Any]:
    """Returns the request that a form describes. Raises `ApiError` 400."""
    system = [{"role": "system", "content": form["system"]}] if form.get("system") else []
    body: dict[str, Any] = {
        "model": form.get("model", ""),
        "messages": [*system, {"role": "user", "content": form.get("message", "")}],
    }
    for name, kind, sort in (("max_tokens", int, "a whole number"), ("temperature", float, "a number")):
        if value := form.get(name):
            try:
                body[name] = kind(value)
            except ValueError:
                raise errors.invalid(f"'{name}' must be {sort}.", name) from None
    return body


async def show_form(
    request: web.Request,
    viewer: Viewer,
    form: Form | None = None,
    *,
    message: str = "",
    body: Mapping[str, Any] | None = None,
    text: str | None = None,
    facts: Mapping[str, Any] | None = None,
) -> web.StreamResponse:
    return pages.show(
        request,
        viewer,
        "playground.html",
        given={"max_tokens": str(MAX_TOKENS), "temperature": "", **(form or {})},
        models=await models_of(viewer),
        message=message,
        text=text,
        facts=facts,
        curl=body and _curl(body),
        python=body and _python(body),
    )


def _curl(body: Mapping[str, Any]) -> str:
    data = shlex.quote(json.dumps(body, ensure_ascii=False))
    return (
        f'curl "$HEADGATE_URL{CHAT}" -H "authorization: Bearer $HEADGATE_API_KEY"'
        f" -H 'content-type: application/json' -d {data}"
    )


def _python(body: Mapping[str, Any]) -> str:
    """Returns a program for the OpenAI client."""
    fields = "".join(f"    {name}={value!r},\n" for name, value in body.items())
    return (
        "import os\nfrom openai import OpenAI\n\n"
        'client = OpenAI(base_url=os.environ["HEADGATE_URL"] + "/v1", api_key=os.environ["HEADGATE_API_KEY"])\n'
        f"answer = client.chat.completions.create(\n{fields})\nprint(answer.choices[0].message.content)"
    )


ROUTES = [
    pages.get("/playground", show_form),
    pages.post("/playground", ask),
    pages.post("/playground/code", show_code),
    pages.post("/playground/stream", stream),
]
