"""A reverse proxy in front of a gateway as most are set up: one line, `proxy_pass`, no header of its own.

Towards the gateway it speaks HTTP/1.0 from 127.0.0.1, one connection per request, with the gateway's own address as Host;
what the client sent, `X-Forwarded-For` included, goes through. Once as the real nginx and once written out here, for machines
without nginx.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path

from aiohttp import web

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
CONFIG = """
daemon off; master_process off; pid {home}/pid; error_log stderr warn;
events {{ worker_connections 768; }}
http {{
    access_log off;
    client_body_temp_path {home}/body; proxy_temp_path {home}/proxy; fastcgi_temp_path {home}/fastcgi;
    uwsgi_temp_path {home}/uwsgi; scgi_temp_path {home}/scgi;
    server {{
        listen 127.0.0.1:{port};
        location / {{ proxy_pass http://127.0.0.1:{upstream}; }}
    }}
}}
"""
HOP_BY_HOP = {"connection", "keep-alive", "te", "upgrade", "host", "transfer-encoding", "trailer"}


@contextlib.asynccontextmanager
async def nginx(home: Path, upstream: int) -> AsyncIterator[str]:
    """Its URL. Needs `NGINX`."""
    assert NGINX
    home.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (home / "nginx.conf").write_text(CONFIG.format(home=home, port=port, upstream=upstream))
    process = await asyncio.create_subprocess_exec(
        NGINX, "-p", str(home), "-c", str(home / "nginx.conf"), "-e", "stderr"
    )
    try:
        async with asyncio.timeout(10):
            while not await _listens(port):
                assert process.returncode is None
                await asyncio.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


@contextlib.asynccontextmanager
async def plain_proxy(home: Path, upstream: int) -> AsyncIterator[str]:
    """Its URL."""

    async def pass_on(request: web.Request) -> web.Response:
        head = [f"{request.method} {request.raw_path} HTTP/1.0", f"Host: 127.0.0.1:{upstream}"]
        head += [f"{name}: {value}" for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP]
        reader, writer = await asyncio.open_connection("127.0.0.1", upstream)
        try:
            writer.write("\r\n".join([*head, "Connection: close", "", ""]).encode())
            writer.write(await request.read())
            answer = await reader.read()
        finally:
            writer.close()
        status, _, body = answer.partition(b"\r\n\r\n")
        return web.Response(status=int(status.split(b" ", 2)[1]), body=body)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", pass_on)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        sock = socket.create_server(("127.0.0.1", 0), backlog=1024)
        await web.SockSite(runner, sock).start()
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        await runner.cleanup()
