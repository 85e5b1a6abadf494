"""`/v1/files` over HTTP: objects, limits, owners, and what hostile uploads come to."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import openai
import pytest
from gateways import RunningGateway, running_gateway, until
from lost_replies import lose_the_reply_to_a_files_commit

from accounting.batches import files
from accounting.batches.file_store import Writer
from gateway.base.app_keys import DATABASE, LIFECYCLE
from gateway.http.upload import MAX_PARTS, UNENDED
from gateway.routes import files as routes


@pytest.fixture
async def gateway(tmp_path: Path, redis_url: str) -> AsyncIterator[RunningGateway]:
    async with running_gateway(tmp_path / "home", redis_url) as gateway:
        yield gateway


@pytest.fixture
async def client(gateway: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with gateway.client() as client:
        yield client


def on_disk(gateway: RunningGateway) -> list[Path]:
    return [path for path in gateway.settings.files_dir.rglob("*") if path.is_file()]


async def post(gateway: RunningGateway, body: bytes, content_type: str) -> tuple[int, dict]:
    async with (
        gateway.session() as session,
        session.post("/v1/files", data=body, headers={"content-type": content_type}) as answer,
    ):
        return answer.status, await answer.json()


def form(*parts: tuple[str, bytes], boundary: str = "xx") -> bytes:
    return (
        b"".join(
            f"--{boundary}\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode() + content + b"\r\n"
            for head, content in parts
        )
        + f"--{boundary}--\r\n".encode()
    )


MULTIPART = "multipart/form-data; boundary=xx"


async def test_uploads_that_do_not_end_take_a_tenants_own_space_and_no_more(gateway, monkeypatch):
    """Each of hundreds counted its own bytes alone, and one key could fill the disk of everybody."""
    monkeypatch.setattr(routes, "TENANT_BYTES", 1 << 20)
    begun = form(('name="purpose"', b"batch"), ('name="file"; filename="a"', b"x" * 340_000)).removesuffix(
        b"\r\n--xx--\r\n"
    )
    head = (
        f"POST /v1/files HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {gateway.keys.api_key}\r\n"
        f"content-type: {MULTIPART}\r\ncontent-length: 900000\r\n\r\n"
    ).encode()
    unended = []
    for _ in range(3):
        _, writer = await gateway.socket()
        writer.write(head + begun)
        unended.append(writer)
    held = gateway.app[UNENDED]
    await until(lambda: sum(held.values()) > 800_000)
    status, answer = await post(
        gateway, form(('name="purpose"', b"batch"), ('name="file"; filename="b"', b"y" * 300_000)), MULTIPART
    )
    assert (status, "all of their space" in answer["error"]["message"]) == (413, True)
    _, other = await gateway.new_tenant("neighbour")
    async with gateway.client(other) as neighbour:
        assert await neighbour.files.create(file=("c", b"z" * 200_000), purpose="batch")
    for writer in unended:
        writer.close()
    await until(lambda: not held)
    status, _ = await post(
        gateway, form(('name="purpose"', b"batch"), ('name="file"; filename="b"', b"y" * 300_000)), MULTIPART
    )
    assert status == 200


async def test_an_upload_keeps_a_rate(tmp_path, redis_url):
    """One byte at a time, each within the time of a piece, kept an upload open for ever."""
    async with running_gateway(tmp_path / "slow", redis_url, body_s=1) as gateway:
        reader, writer = await gateway.socket()
        body = form(('name="purpose"', b"batch"), ('name="file"; filename="a"', b"x" * 100))
        head = (
            f"POST /v1/files HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {gateway.keys.api_key}\r\n"
            f"content-type: {MULTIPART}\r\ncontent-length: {len(body)}\r\n\r\n"
        ).encode()
        writer.write(head + body[:-100])
        for byte in body[-100:]:
            if reader._buffer:
                break
            writer.write(bytes([byte]))
            await asyncio.sleep(0.1)
        assert (await reader.readline()).startswith(b"HTTP/1.1 408")
        writer.close()


async def test_a_file_comes_back_byte_for_byte_until_it_is_deleted(gateway, client):
    content = bytes(range(256)) * 1000 + b"no newline"
    made = await client.files.create(file=("a.jsonl", io.BytesIO(content)), purpose="batch")
    assert made.id.startswith("file-")
    assert (made.bytes, made.filename, made.purpose, made.status) == (len(content), "a.jsonl", "batch", "processed")
    assert made.expires_at - made.created_at == 30 * 86_400
    assert await client.files.retrieve(made.id) == made
    answer = await client.files.content(made.id)
    assert answer.content == content
    assert answer.response.headers["content-type"] == "application/octet-stream"
    assert [f.id for f in (await client.files.list()).data] == [made.id]
    deleted = await client.files.delete(made.id)
    assert (deleted.id, deleted.deleted) == (made.id, True)
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            await call(made.id)


@pytest.mark.parametrize("during", ["the end of the file", "COMMIT"])
async def test_a_client_that_leaves_leaves_a_file_and_its_row_or_neither(gateway, monkeypatch, during):
    waits, may_go_on = threading.Event(), threading.Event()
    finish, writing = Writer.finish, routes.writing

    def late(writer):
        sha256 = finish(writer)
        waits.set()
        assert may_go_on.wait(20)
        return sha256

    @asynccontextmanager
    async def committing(*args, **options):
        async with writing(*args, **options) as conn:
            yield conn
        waits.set()
        await asyncio.to_thread(may_go_on.wait, 20)

    if during == "COMMIT":
        monkeypatch.setattr(routes, "writing", committing)
    else:
        monkeypatch.setattr(Writer, "finish", late)
    body = form(('name="purpose"', b"batch"), ('name="file"; filename="a"', b"x" * 100))
    asked = asyncio.create_task(post(gateway, body, MULTIPART))
    await until(waits.is_set)
    asked.cancel()
    await asyncio.wait([asked])
    await asyncio.sleep(0.3)  # the gateway hears of it
    may_go_on.set()
    await until(lambda: not gateway.app[LIFECYCLE].num_running)
    await asyncio.sleep(0.1)
    assert len(on_disk(gateway)) == len(await gateway.sql("SELECT id FROM file"))


async def test_an_upload_whose_commit_lost_its_reply_can_be_read(gateway, monkeypatch):
    body = form(('name="purpose"', b"batch"), ('name="file"; filename="a"', b"x" * 100))
    with monkeypatch.context() as patch:
        lose_the_reply_to_a_files_commit(patch, gateway.app[DATABASE])
        status, _ = await post(gateway, body, MULTIPART)
    assert status == 503
    async with gateway.client() as client:
        [made] = (await client.files.list()).data
        assert (await client.files.content(made.id)).content == b"x" * 100


async def test_the_bytes_are_not_readable_on_the_disk(gateway, client):
    secret = b"canary-in-a-file" * 10_000
    await client.files.create(file=("a", io.BytesIO(secret)), purpose="user_data")
    (path,) = on_disk(gateway)
    assert b"canary" not in path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600


async def test_another_tenants_file_is_as_one_that_never_existed(gateway, client):
    made = await client.files.create(file=("a", io.BytesIO(b"x")), purpose="batch")
    _, key = await gateway.new_tenant("other")
    answers = []
    async with gateway.session(key) as session:
        for file_id in (made.id, "file-" + "0" * 32):
            for method, tail in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
                async with session.request(method, f"/v1/files/{file_id}{tail}") as answer:
                    answers.append((answer.status, await answer.read()))
        async with session.get("/v1/files") as answer:
            assert (await answer.json())["data"] == []
        async with session.get("/v1/files", params={"after": made.id}) as answer:
            assert answer.status == 400
    assert len(set(answers)) == 1
    assert answers[0][0] == 404
    assert (await client.files.retrieve(made.id)).id == made.id


@pytest.mark.parametrize(
    ("scopes", "allowed"), [(["files:read"], {"GET"}), (["files:write"], {"POST", "DELETE"}), (["chat"], set())]
)
async def test_each_method_needs_its_scope(gateway, scopes, allowed):
    _, key = await gateway.new_tenant("narrow", scopes)
    async with gateway.session(key) as session:
        for method, path in (("GET", "/v1/files"), ("DELETE", "/v1/files/file-0"), ("POST", "/v1/files")):
            async with session.request(method, path) as answer:
                assert (answer.status != 403) == (method in allowed), (method, answer.status)


HOSTILE_NAMES = (
    "../../etc/passwd",
    "/etc/shadow",
    "a\\..\\b",
    "nul\0.txt",
    "CON",
    "．．／x",
    "x" * 5000,
    ".",
    "\u202egnp",
)
BROKEN = (
    (b"--xx--\r\n", MULTIPART, 400),
    (b"", MULTIPART, 400),
    (b"garbage without any boundary", MULTIPART, 400),
    (form(('name="purpose"', b"batch")), MULTIPART, 400),
    (form(('name="file"; filename="a"', b"x")), MULTIPART, 400),
    (form(('name="file"; filename="a"', b"x")), "multipart/form-data", 400),
    (form(('name="file"; filename="a"', b"x")), "multipart/form-data; boundary=" + "y" * 200, 400),
    (form(('name="file"; filename="a"', b"x"))[:-10], MULTIPART, 400),
    (b"{}", "application/json", 415),
    (form(*[(f'name="f{i}"', b"x") for i in range(MAX_PARTS + 1)]), MULTIPART, 400),
    (form(('name="purpose"', b"p" * 5000)), MULTIPART, 413),
    (form(('name="purpose"', b"batch"), ('name="purpose"', b"vision")), MULTIPART, 400),
    (form(('name="purpose"', b"\xff\xfe")), MULTIPART, 400),
    (form(('name="file"; filename="a"', b"x"), ('name="file"; filename="b"', b"y")), MULTIPART, 400),
    (form(('name="file"; filename="a"\r\nContent-Encoding: gzip', b"x")), MULTIPART, 400),
    (form(('name="file"; filename="a"\r\nContent-Transfer-Encoding: base64', b"eA==")), MULTIPART, 400),
    (form(('name="file"; filename="a"\r\nContent-Transfer-Encoding: quoted-printable', b"x")), MULTIPART, 400),
    (form(('name="file"; filename="a"\r\nContent-Type: multipart/mixed; boundary=zz', b"x")), MULTIPART, 400),
    (form(('name="a"\r\n' + "X: y\r\n" * 300, b"x")), MULTIPART, 400),
    (form(('name="a"\r\nX: ' + "y" * 20_000, b"x")), MULTIPART, 400),
    (form(("nothing", b"x")), MULTIPART, 400),
    (form(('name="purpose"', b"batch_output"), ('name="file"; filename="a"', b"x")), MULTIPART, 400),
)


async def test_attack_E05_a_hostile_name_is_metadata_only(gateway, client):
    for number, name in enumerate(HOSTILE_NAMES, 1):
        made = await client.files.create(file=(name, io.BytesIO(b"hello")), purpose="batch")
        assert "\0" not in made.filename
        assert len(made.filename) <= 512
        assert len(on_disk(gateway)) == number
        assert all(path.parent == gateway.settings.files_dir and len(path.name) == 32 for path in on_disk(gateway))
        assert (await client.files.content(made.id)).content == b"hello"


@pytest.mark.filterwarnings("ignore::aiohttp.multipart.BadContentDispositionHeader")
async def test_attack_E06_a_broken_upload_is_refused_and_leaves_nothing(gateway):
    for body, content_type, status in BROKEN:
        answer = await post(gateway, body, content_type)
        assert answer[0] == status, (body[:200], answer)
        assert answer[1]["error"]["message"]
        assert on_disk(gateway) == [], body[:200]


@pytest.mark.parametrize("line", [b"\n", b"x\r\n"])
async def test_attack_E06_lines_before_the_first_part_are_few(gateway, line):
    """Each would be read by itself, and all that have arrived in one turn of the loop."""
    upload = form(('name="purpose"', b"batch"), ('name="file"; filename="a"', b"x\n" * 100_000))
    assert (await post(gateway, line * 100 + upload, MULTIPART))[0] == 200
    status, answer = await post(gateway, line * 100_000 + upload, MULTIPART)
    assert (status, answer["error"]["code"]) == (400, "invalid_value")
    assert len(on_disk(gateway)) == 1


async def test_a_part_may_say_that_its_bytes_are_as_they_are(gateway, client):
    """Ruby's multipart-post and Apache's HttpClient name the encoding of each file, and were refused."""
    data = b"\x00\xff=3D\n"
    for encoding in ("binary", "8bit", "7BIT"):
        head = f'name="file"; filename="a"\r\nContent-Length: {len(data)}\r\nContent-Transfer-Encoding: {encoding}'
        status, made = await post(gateway, form(('name="purpose"', b"user_data"), (head, data)), MULTIPART)
        assert status == 200, made
        assert (await client.files.content(made["id"])).content == data


async def test_attack_E06_size_is_bounded_by_purpose_wherever_the_purpose_stands(gateway, client, monkeypatch):
    monkeypatch.setitem(routes.MAX_BYTES, "batch", 1000)
    file, purpose = ('name="file"; filename="a"', b"x" * 1001), ('name="purpose"', b"batch")
    for parts in ((file, purpose), (purpose, file)):
        assert (await post(gateway, form(*parts), MULTIPART))[0] == 413
    assert on_disk(gateway) == []
    await client.files.create(file=("a", io.BytesIO(b"x" * 1000)), purpose="batch")
    await client.files.create(file=("a", io.BytesIO(b"x" * 1001)), purpose="user_data")


async def test_attack_E06_an_endless_upload_ends_at_the_limit(gateway, monkeypatch):
    for purpose in routes.MAX_BYTES:
        monkeypatch.setitem(routes.MAX_BYTES, purpose, 2 * 1024 * 1024)

    async def endless():
        yield b'--xx\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        while True:
            yield b"\0" * 65536

    async with gateway.session() as session:
        try:
            async with session.post("/v1/files", data=endless(), headers={"content-type": MULTIPART}) as answer:
                assert answer.status == 413
        except aiohttp.ClientConnectionError:
            pass  # refused while it was still sending
    assert on_disk(gateway) == []


async def test_attack_E06_the_disk_quota_of_a_tenant_holds(gateway, client, monkeypatch):
    monkeypatch.setattr(routes, "TENANT_BYTES", 50_000)
    await client.files.create(file=("a", io.BytesIO(b"x" * 30_000)), purpose="batch")
    with pytest.raises(openai.APIStatusError) as refused:
        await client.files.create(file=("a", io.BytesIO(b"x" * 30_000)), purpose="batch")
    assert refused.value.status_code == 413
    assert len(on_disk(gateway)) == 1


async def test_attack_E06_files_of_no_bytes_have_an_end(gateway, monkeypatch):
    """They counted nothing: one key could take all inodes of the disk that the journal lies on."""
    monkeypatch.setattr(routes, "TENANT_BYTES", 3 * files.LEAST_BYTES)
    upload = form(('name="purpose"', b"batch"), ('name="file"; filename="a"', b""))
    assert [(await post(gateway, upload, MULTIPART))[0] for _ in range(5)] == [200] * 3 + [413] * 2
    assert len(on_disk(gateway)) == 3
    assert not gateway.app[UNENDED]


async def test_a_client_that_trickles_or_leaves_takes_no_disk(tmp_path, redis_url):
    async with running_gateway(tmp_path / "home", redis_url, body_s=0.3) as gateway:
        reader, writer = await gateway.socket()
        head = (
            f"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {gateway.keys.api_key}\r\n"
            f"Content-Type: {MULTIPART}\r\nContent-Length: 10000\r\n\r\n"
            '--xx\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nabc'
        )
        writer.write(head.encode())
        await writer.drain()
        assert b" 408 " in await reader.readline()
        writer.close()
        assert on_disk(gateway) == []


@pytest.mark.parametrize(
    ("expiry", "ok"),
    [
        ({"anchor": "created_at", "seconds": 3600}, True),
        ({"anchor": "created_at", "seconds": 3599}, False),
        ({"anchor": "created_at", "seconds": 2_592_001}, False),
        ({"anchor": "last_used_at", "seconds": 3600}, False),
    ],
)
async def test_expiry_is_within_an_hour_and_thirty_days(client, expiry, ok):
    call = client.files.create(file=("a", io.BytesIO(b"x")), purpose="batch", expires_after=expiry)
    if ok:
        made = await call
        assert made.expires_at - made.created_at == 3600
    else:
        with pytest.raises(openai.BadRequestError):
            await call


async def test_lists_go_on_behind_the_last_object_seen(client):
    ids = [
        (await client.files.create(file=(f"{i}", io.BytesIO(b"x")), purpose=purpose)).id
        for i, purpose in enumerate(["batch", "vision", "batch"])
    ]
    seen = [file.id async for file in client.files.list(limit=1)]
    assert sorted(seen) == sorted(ids)
    assert [f.id async for f in client.files.list(limit=2, order="asc")] == seen[::-1]
    assert {f.id async for f in client.files.list(purpose="batch")} == {ids[0], ids[2]}


async def test_s9_uploads_at_the_same_time_keep_the_disk_quota(gateway, monkeypatch):
    monkeypatch.setattr(files, "LEAST_BYTES", 1)
    monkeypatch.setattr(routes, "TENANT_BYTES", 1500)
    body = form(('name="purpose"', b"batch"), ('name="file"; filename="a"', b"x" * 600))
    everybody_is_in = asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield body[:200]
        await everybody_is_in.wait()
        yield body[200:]

    async def upload() -> tuple[int, str | None]:
        headers = {"content-type": MULTIPART}
        async with gateway.session() as session, session.post("/v1/files", data=slowly(), headers=headers) as answer:
            error = (await answer.json()).get("error")
            return answer.status, error and error["code"]

    uploads = [asyncio.create_task(upload()) for _ in range(6)]
    await until(lambda: len(on_disk(gateway)) == 6)  # each was let in: the quota has room
    everybody_is_in.set()
    answers = await asyncio.gather(*uploads)
    assert sorted(answers) == [(200, None)] * 2 + [(413, "request_too_large")] * 4
    assert len(on_disk(gateway)) == 2
