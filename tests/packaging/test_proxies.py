"""The proxies of docs/proxies.md, as they are printed: nginx in front of a server that streams slowly, and Caddy's check."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from load import stretched
from packaged import ROOT, ran

PAGE = (ROOT / "docs" / "proxies.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.M | re.S)
NGINX = next(text for language, text in BLOCKS if language == "nginx" and "upstream" in text)
REFUSAL = next(text for language, text in BLOCKS if language == "nginx" and "deny all" in text)
CADDY = next(text for language, text in BLOCKS if language == "")


class SlowStream(BaseHTTPRequestHandler):
    """Sends one event at once and another after a second, and says which headers it got. An upgrade is taken, and what comes
    then is sent back.
    """

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.headers["connection"] == "upgrade" and self.headers["upgrade"] == "websocket":
            self.send_response(101)
            self.send_header("connection", "upgrade")
            self.send_header("upgrade", "websocket")
            self.end_headers()
            self.wfile.write(self.rfile.read(5))
            self.close_connection = True
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        told = " ".join(
            str(self.headers[name]) for name in ("x-forwarded-for", "x-forwarded-proto", "host", "connection")
        )
        for text in (f"data: {told}\n\n", "data: [DONE]\n\n"):
            self.wfile.write(f"{len(text):x}\r\n{text}\r\n".encode())
            self.wfile.flush()
            time.sleep(1)
        with contextlib.suppress(BrokenPipeError):  # the client has heard enough
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def answers(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def nginx(tmp_path: Path) -> Iterator[int]:
    if shutil.which("nginx") is None or shutil.which("openssl") is None:
        pytest.skip("nginx or openssl is not installed")
    server = ThreadingHTTPServer(("127.0.0.1", 0), SlowStream)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    subject = ("-subj", "/CN=llm.example.org")
    ran(
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "1",
        *subject,
        "-keyout",
        tmp_path / "k",
        "-out",
        tmp_path / "c",
    )
    port = free_port()
    text = NGINX.replace("    location / {", REFUSAL + "    location / {")
    text = text.replace("127.0.0.1:8080", f"127.0.0.1:{server.server_port}").replace(
        "listen 443", f"listen 127.0.0.1:{port}"
    )
    text = text.replace("/etc/ssl/llm.example.org.pem", str(tmp_path / "c")).replace(
        "/etc/ssl/llm.example.org.key", str(tmp_path / "k")
    )
    version = re.search(
        r"nginx/(\d+)\.(\d+)", subprocess.run(["nginx", "-v"], capture_output=True, text=True, check=True).stderr
    )
    if (int(version[1]), int(version[2])) < (1, 25):  # the directive of its own is newer than Debian 12
        text = re.sub(r"    http2 on;.*\n", "", text.replace(" ssl;", " ssl http2;", 1))
    temp = "".join(
        f"{kind}_temp_path {tmp_path}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (tmp_path / "nginx.conf").write_text(
        f"daemon off; pid {tmp_path}/pid; error_log {tmp_path}/log;\nevents {{}}\nhttp {{\naccess_log off;\n{temp}{text}}}\n"
    )
    process = subprocess.Popen(["nginx", "-p", tmp_path, "-c", tmp_path / "nginx.conf", "-e", tmp_path / "log"])
    deadline = time.monotonic() + stretched(20)
    while not answers(port):
        assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
        time.sleep(0.1)
    yield port
    process.terminate()
    process.wait(10)
    server.shutdown()
    server.server_close()


def asked(port: int, path: str, more: str = "Connection: close\r\n") -> ssl.SSLSocket:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    link = context.wrap_socket(socket.create_connection(("127.0.0.1", port), 10), server_hostname="llm.example.org")
    link.sendall(
        f"GET {path} HTTP/1.1\r\nHost: llm.example.org:8443\r\nX-Forwarded-For: 6.6.6.6\r\n{more}\r\n".encode()
    )
    return link


def test_nginx_hands_events_on_at_once_and_says_who_the_client_is(nginx):
    with asked(nginx, "/v1/chat/completions") as link:
        begun, heard = time.monotonic(), b""
        while b"\n\n" not in heard.partition(b"\r\n\r\n")[2]:
            heard += link.recv(4096)
        assert time.monotonic() - begun < 0.9, "the first event waited for the second"
        assert b"data: 127.0.0.1 https llm.example.org:8443" in heard, (
            "a client chose its own address, or lost its port"
        )


def test_nginx_keeps_connections_to_headgate_open_between_requests(nginx):
    with asked(nginx, "/v1/models") as link:
        heard = b""
        while b"data: " not in heard:
            heard += link.recv(4096)
    assert b"llm.example.org:8443 None" in heard, "it was told to close or to upgrade the connection"


def test_nginx_hands_a_websocket_on(nginx):
    """`GET /v1/responses` is one: the two headers of an upgrade are of the connection, and nginx passes on none of them itself."""
    upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    with asked(nginx, "/v1/responses", upgrade) as link:
        heard = b""
        while b"\r\n\r\n" not in heard:
            heard += link.recv(4096)
        assert b" 101 " in heard, heard
        link.sendall(b"hello")
        assert link.recv(5) == b"hello"


ADMINS = (
    "/console",
    "/admin/v1/books",
    "/v1/organization/projects",
    "/v1/organization/admin_api_keys",
    "/v1/organization/spend_limit",
    "/v1/organization/usage/../projects",
    "/v1/organization/usage/%2e%2e/projects",
    "//admin/v1/books",
)
EVERYBODYS = ("/v1/models", "/v1/organization/usage/completions", "/v1/organization/costs", "/v1/me/limits")


@pytest.mark.parametrize("path", ADMINS)
def test_nginx_keeps_what_operators_use_from_others(nginx, path):
    with asked(nginx, path) as link:
        assert b" 403 " in link.recv(4096)


@pytest.mark.parametrize("path", EVERYBODYS)
def test_nginx_lets_tenants_to_what_is_theirs(nginx, path):
    with asked(nginx, path) as link:
        assert b" 200 " in link.recv(4096)


def test_caddy_takes_its_block(tmp_path):
    if shutil.which("caddy") is None:
        pytest.skip("caddy is not installed")
    (tmp_path / "Caddyfile").write_text(CADDY)
    ran("caddy", "validate", "--adapter", "caddyfile", "--config", tmp_path / "Caddyfile")
