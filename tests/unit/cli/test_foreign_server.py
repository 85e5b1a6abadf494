"""A server that answers in place of Headgate: every command says so in one sentence."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from click.testing import CliRunner

from gateway.cli.exit_codes import FAILED
from gateway.cli.main import main

ANSWERS = {
    "JSON of another program": (200, "application/json", b'{"hello": "world"}', "Start it with `headgate up`"),
    "an error of another program": (404, "application/json", b'{"error": {"message": "No."}}', "Start it with"),
    "a page of a proxy": (502, "text/html", b"<h1>502 Bad Gateway</h1>", "a proxy that reaches none, for example"),
    "a proxy without a server": (503, "application/json", b'{"status": "ok"}', "a proxy that reaches none"),
}


@pytest.fixture
def serve(monkeypatch):
    servers = []

    def started(status: int, kind: str, content: bytes) -> str:
        class Foreign(BaseHTTPRequestHandler):
            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("content-length") or 0))
                self.send_response(status)
                self.send_header("x-request-id", self.headers.get("x-request-id") or "4711")
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_DELETE = answer

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Foreign)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setenv("HEADGATE_URL", url)
        return url

    yield started
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("tenants", "list"), "hg_admin_x"),
        (("invoice", "export", "INV-1"), "hg_admin_x"),
        (("status",), "hg_admin_x"),
        (("chat", "Hello"), "hg_live_x"),
        (("chat", "Hello", "--model", "any"), "hg_live_x"),
        (("batches", "estimate", "lines.jsonl"), "hg_live_x"),
    ],
)
def test_an_answer_of_another_server_is_one_sentence(name, words, key, serve, tmp_path, monkeypatch):
    status, kind, content, hint = ANSWERS[name]
    url = serve(status, kind, content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADGATE_API_KEY", key)
    (tmp_path / "lines.jsonl").write_text("{}\n")
    done = CliRunner().invoke(main, [*words, "--home", str(tmp_path)])
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"headgate: Something answers at {url} with status {status}, and is not Headgate"), line
    assert hint in line and line.endswith("set HEADGATE_URL.")
    assert done.exit_code == FAILED
