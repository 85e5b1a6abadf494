"""A backup: one tar file with all that a home cannot make again. This module packs and unpacks it; it runs no command.

manifest.json        what made it, when, the schema's revision, and the SHA-256 of every other member
database             SQLite's file, or what `pg_dump --format=custom` wrote
home/                secrets, credentials.json, headgate.toml, files
state/<slot>/        the journals' segments

**The order makes it consistent while Headgate runs.** Journals and files are noted first, by hard links, so that
none of them can go; then the database is copied; then what came meanwhile is noted too, and how long each journal is
now. So the copy of every journal goes at least as far as the copy of the database knows it, and a start with both is a
start after a power loss at that moment. Gateways' journals are noted before workers', because a worker counts a token
before a gateway ends its request. What a worker's journal has beyond that moment, a restore leaves out
(`gateway/journal/engine_records.py`).
"""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from accounting.values.progress import Told, nobody
from gateway.base.home import Home, HomeError
from gateway.journal.dead_letters import DEAD_LETTERS
from gateway.journal.journals import GATEWAY
from workers.protocol.segments import SET_ASIDE, list_segments

FORMAT = 1
MANIFEST, DATABASE, OF_HOME, OF_STATE = "manifest.json", "database", "home", "state"
KEPT = ("secrets", "credentials.json", "headgate.toml", "files")
"""The parts of a home that are kept in addition to database and journals. Sockets, logs, and Redis' file are made again."""
FILES = f"{OF_HOME}/files/"
UNPACKED, HELD = ".restoring", ".backup-"
CHUNK_BYTES = 1 << 20


class Manifest(msgspec.Struct, frozen=True):
    format: int
    headgate: str
    """The version that took the backup."""
    taken_at: int
    database: str
    """The dialect: `sqlite` or `postgresql`."""
    revision: str | None
    sha256: dict[str, str]
    """The checksum of every other member."""


class Member(NamedTuple):
    """A file that goes into the archive."""

    name: str
    source: Path
    num_bytes: int | None = None
    """How much of it; None means as much as there is when it is packed."""


class Sources:
    """The files of a home that go into the archive, held by links in directories of their own."""

    def __init__(self, home: Home, held: Path, held_files: Path) -> None:
        """`held_files` is for `files/`, which may be another mount: no link leads out of one."""
        self._home, self._held, self._held_files = home, held, held_files
        self._numbers = itertools.count()
        self._members: dict[str, Member] = {}

    @property
    def members(self) -> list[Member]:
        return list(self._members.values())

    def note(self) -> None:
        """Holds what there is now. Called twice: what went away in between stays held, and what is new is added."""
        for name, member in self._members.items():  # one that has gone meanwhile may have grown before it went
            self._members[name] = _measured(name, member.source)
        for name, path in self._found():
            known = self._members.get(name)
            room = self._held_files if name.startswith(FILES) else self._held
            held = known.source if known is not None else room / str(next(self._numbers))
            try:
                _hold(path, held)
            except FileNotFoundError:  # it went before it could be held, so the database has it or needs it no more
                continue
            self._members[name] = _measured(name, held)

    def _found(self) -> Iterator[tuple[str, Path]]:
        state = self._home.state
        slots = sorted(state.iterdir()) if state.is_dir() else []
        for slot in sorted(slots, key=lambda path: not path.name.startswith(GATEWAY)):
            for path in _journal(slot / "journal"):
                yield f"{OF_STATE}/{slot.name}/journal/{path.name}", path
        for name in KEPT:
            root = self._home.root / name
            paths = sorted(root.rglob("*")) if root.is_dir() else [root]
            for path in paths:
                below = path.relative_to(self._home.root).as_posix()
                if path.is_file() and f"/{HELD}" not in below:
                    yield f"{OF_HOME}/{below}", path


def _measured(name: str, held: Path) -> Member:
    return Member(name, held, held.stat().st_size if name.startswith(OF_STATE) else None)


@contextmanager
def held_sources(home: Home) -> Iterator[Sources]:
    files = home.root / "files"
    with (
        tempfile.TemporaryDirectory(prefix=HELD, dir=home.root) as held,
        tempfile.TemporaryDirectory(prefix=HELD, dir=files if files.is_dir() else home.root) as held_files,
    ):
        yield Sources(home, Path(held), Path(held_files))


def pack(path: Path, manifest: Manifest, members: Sequence[Member], told: Told = nobody) -> Manifest:
    """Writes the archive, mode 0600, as a whole or not at all. Raises `HomeError`, also if the file exists."""
    checksums: dict[str, str] = {}
    bytes_read = _Counted(sum(member.source.stat().st_size for member in members), told)
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", suffix=".partial") as file:
            with tarfile.open(fileobj=file, mode="w") as tar:
                for member in members:
                    checksums[member.name] = _add(tar, member, bytes_read)
                written = msgspec.structs.replace(manifest, sha256=checksums)
                content = msgspec.json.encode(written)
                tar.addfile(_info(MANIFEST, len(content), manifest.taken_at), io.BytesIO(content))
            file.flush()
            os.fsync(file.fileno())
            os.link(file.name, path)
    except FileExistsError:
        raise HomeError(f"The file {path} exists, and nothing is overwritten: give another name.") from None
    except OSError as error:
        raise HomeError(f"The backup {path} cannot be written: {error.strerror}.") from None
    return written


@contextmanager
def opened(path: Path) -> Iterator[tuple[tarfile.TarFile, Manifest]]:
    """Raises `HomeError` for a file that is no backup, or one of a later form."""
    try:
        with tarfile.open(path, mode="r:") as tar:
            file = tar.extractfile(MANIFEST)
            manifest = msgspec.json.decode(file.read() if file else b"", type=Manifest)
            if manifest.format != FORMAT:
                raise HomeError(f"The backup {path} has form {manifest.format}; this Headgate reads form {FORMAT}.")
            yield tar, manifest
    except (tarfile.TarError, KeyError, msgspec.DecodeError, EOFError):
        raise HomeError(f"The file {path} is not a backup of Headgate, or it is damaged.") from None
    except OSError as error:
        raise HomeError(f"The backup {path} cannot be read: {error.strerror or error}.") from None


def slots_in(manifest: Manifest) -> list[str]:
    """Returns the slots whose journals the archive has."""
    return sorted({name.split("/")[1] for name in manifest.sha256 if name.startswith(f"{OF_STATE}/")})


def unpack(
    tar: tarfile.TarFile, manifest: Manifest, directory: Path | None, told: Told = nobody, *, part: str = ""
) -> None:
    """Checks every member, and writes it below `directory` if that is given and its name begins with `part`. Raises
    `HomeError`; names are those of the manifest, and none may lead elsewhere.
    """
    there = {member.name: member for member in tar.getmembers() if member.name != MANIFEST}
    if there.keys() != manifest.sha256.keys():
        raise HomeError("The backup is damaged: its members are not those of its manifest.")
    counted = _Counted(sum(member.size for member in there.values()), told)
    for name, member in there.items():
        parts = Path(name).parts
        if not member.isreg() or name.startswith("/") or ".." in parts:
            raise HomeError(f"The backup is damaged: {name!r} is not a file of a home.")
        source = tar.extractfile(member)
        assert source is not None  # only of what is no file
        target = directory / name if directory is not None and name.startswith(part) else None
        if _read(source, target, counted) != manifest.sha256[name]:
            raise HomeError(f"The backup is damaged: the content of {name!r} is not what was packed.")


def _read(source: IO[bytes], target: Path | None, counted: _Counted) -> str:
    """Returns the checksum of all that is read."""
    digest = hashlib.sha256()
    if target is None:
        while chunk := source.read(CHUNK_BYTES):
            digest.update(chunk)
            counted.add(len(chunk))
        return digest.hexdigest()
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        while chunk := source.read(CHUNK_BYTES):
            digest.update(chunk)
            file.write(chunk)
            counted.add(len(chunk))
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _add(tar: tarfile.TarFile, member: Member, counted: _Counted) -> str:
    with member.source.open("rb") as file:
        status = os.fstat(file.fileno())
        num_bytes = status.st_size if member.num_bytes is None else min(member.num_bytes, status.st_size)
        reader = _Hashing(file, counted)
        tar.addfile(_info(member.name, num_bytes, int(status.st_mtime)), reader)  # type: ignore[arg-type]  # it only reads
        return reader.digest.hexdigest()


class _Counted:
    """Adds up bytes, and tells how many of all there are."""

    def __init__(self, of: int, told: Told) -> None:
        self._done, self._of, self._told = 0, of, told

    def add(self, number: int) -> None:
        self._done += number
        self._told(self._done, self._of)


class _Hashing:
    def __init__(self, file: IO[bytes], counted: _Counted) -> None:
        self._file = file
        self._counted = counted
        self.digest = hashlib.sha256()

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self.digest.update(data)
        self._counted.add(len(data))
        return data


def _info(name: str, size: int, at: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = size, 0o600, at
    return info


def _journal(directory: Path) -> list[Path]:
    """Returns the segments, those that were set aside, and the letters that SQL will never take. No lock, no ballast."""
    if not directory.is_dir():
        return []
    beside = [*directory.glob(f"*{SET_ASIDE}"), directory / DEAD_LETTERS]
    return [segment.path for segment in list_segments(directory)] + [path for path in beside if path.exists()]


def _hold(path: Path, held: Path) -> None:
    """Links the file, or copies it where links cannot be made. A copy is made again, because the file may have grown."""
    if held.exists() and held.stat().st_ino == path.stat().st_ino:
        return
    try:
        held.unlink(missing_ok=True)
        os.link(path.resolve(), held)  # a link that is relative means something else there
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(path, held)
