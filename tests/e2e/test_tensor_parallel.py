"""`headgate up --tensor-parallel 2`: one worker, two processes, the same books."""

from __future__ import annotations

from pathlib import Path


def children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_a_worker_of_two_processes_serves_and_keeps_the_books(start_server):
    server = start_server("--tensor-parallel", "2")
    (worker,) = server.ready["pids"]["worker"]
    (rank,) = children(worker)
    assert b"workers.engine.follower" in Path(f"/proc/{rank}/cmdline").read_bytes()
    reply = server.client().chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": "What does json.dumps do?"}],
        max_tokens=16,
        temperature=0,
    )
    assert reply.usage.completion_tokens == 16
    assert reply.choices[0].message.content.startswith("`json.dumps")
    server.verify_books()
    assert server.stop() == 0
    assert not Path(f"/proc/{rank}").exists()
