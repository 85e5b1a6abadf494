"""The state directory (HEADGATE_HOME): its layout, its secrets, its lock. It knows no database and no process.

headgate.db          SQLite, unless HEADGATE_DATABASE_URL names another database
secrets/             pepper and master.key, 32 random bytes each, 0600
credentials.json     the first admin key and tenant key, 0600
state/<slot>/        one journal directory per gateway and worker slot
redis/ files/ logs/  embedded store, uploaded files, one log per process
run/                 sockets and the description of what runs now
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SOCKET_PATH_MAX = 107
"""Bytes of `sockaddr_un.sun_path` less its terminator (Linux)."""
LONGEST_SOCKET_NAME = "/gateway-999.sock"
SECRET_BYTES = 32
SECRETS = ("pepper", "master.key")
NEXT = ".next"
"""Suffix of a key file that `headgate secrets` writes before the database changes to it."""
NAME = ".headgate"
"""The directory's name where nobody gives another one."""


class HomeError(Exception):
    """The home cannot be used. The message is one sentence for the operator, and the command ends with it."""


def default_home() -> Path:
    """Returns HEADGATE_HOME, else `.headgate` of the working directory if it is there, else `~/.headgate`. Raises
    `HomeError` for an empty name, because that would mean the current directory.
    """
    given = os.environ.get("HEADGATE_HOME")
    if given == "":
        raise HomeError("The variable HEADGATE_HOME is empty: unset it, or name a directory.")
    if given is None and Path(NAME).is_dir():
        return Path(NAME).absolute()
    try:
        return Path(given or f"~/{NAME}").expanduser()
    except RuntimeError:
        raise HomeError(f"HEADGATE_HOME = {given!r} names no directory: write its whole path.") from None


@dataclass(frozen=True, slots=True)
class Home:
    """Paths below one state directory."""

    root: Path

    @property
    def database(self) -> Path:
        return self.root / "headgate.db"

    @property
    def is_there(self) -> bool:
        """Says whether a start has made this home."""
        return (self.root / "secrets").is_dir() or self.database.exists()

    def refuse_absent(self) -> None:
        """Keeps a command that only reads from leaving an empty database where no home is. Raises `HomeError`."""
        if not self.is_there:
            raise HomeError(
                f"There is no home in {self.root}: name one with --home or HEADGATE_HOME, or make one with `headgate up`."
            )

    @property
    def credentials(self) -> Path:
        return self.root / "credentials.json"

    @property
    def ready(self) -> Path:
        """The file in which `headgate up` describes the processes that run now; it is absent when none run."""
        return self.root / "run" / "ready.json"

    @property
    def models(self) -> Path:
        """The models that `headgate up` serves now, for its gateways."""
        return self.root / "run" / "models.json"

    @property
    def reloaded(self) -> Path:
        """The outcome of the last `headgate reload`."""
        return self.root / "run" / "reloaded.json"

    @property
    def state(self) -> Path:
        """The directory with one journal directory per slot. HEADGATE_STATE_DIR may move it."""
        return Path(os.environ.get("HEADGATE_STATE_DIR") or self.root / "state")

    @property
    def redis(self) -> Path:
        return self.root / "redis"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def run(self) -> Path:
        """Directory of the sockets: `run/`, or the private short one that `make_run` has made, if its path would not fit."""
        run, link = self.root / "run", self._link_to_run
        return run if _fits(run) or not (link.is_symlink() and link.is_dir()) else Path(os.readlink(link))

    def make_run(self) -> None:
        """Makes the directory of the sockets. A process that has sockets calls it at its start. Raises `HomeError`."""
        with usable(self.root):
            (self.root / "run").mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _fits(self.run):
            self._make_short_run()

    def _make_short_run(self) -> None:
        """Makes a directory with a short name, and a link to it: every process of this home finds the same sockets."""
        base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
        try:
            short = Path(tempfile.mkdtemp(prefix="hg-", dir=base))
        except OSError as error:
            raise HomeError(
                f"No directory for sockets can be made in {base}: {error.strerror}; name another with XDG_RUNTIME_DIR."
            ) from None
        if not _fits(short):
            raise HomeError(f"No directory has a path that is short enough for sockets: {short} is too long.")
        with usable(self.root):
            self._link_to_run.unlink(missing_ok=True)
            self._link_to_run.symlink_to(short)

    @property
    def _link_to_run(self) -> Path:
        return self.root / "run" / "short"

    @property
    def database_url(self) -> str:
        return f"sqlite+aiosqlite:///{self.database}"

    @property
    def missing_secrets(self) -> list[Path]:
        """The key files that `prepare` would draw."""
        return [path for name in SECRETS if not (path := self.root / "secrets" / name).exists()]

    def prepare(self) -> None:
        """Creates missing directories (mode 0700) and secrets. For a database that may be in use, call
        `gateway.cli.start_checks.refuse_new_secrets` first. Raises `HomeError`.
        """
        with usable(self.root):
            for path in (self.root, *(self.root / name for name in ("secrets", "state"))):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name in ("redis", "logs", "files"):
                (self.root / name).mkdir(mode=0o700, exist_ok=True)
            for name in SECRETS:
                _write_secret_once(self.root / "secrets" / name)
        self.make_run()

    def refuse_open_rotation(self, name: str) -> None:
        """Refuses to go on beside a rotation that was interrupted: the file beside the key may be the only copy of the one in
        use. Raises `HomeError`.
        """
        path = self.root / "secrets" / name
        if path.with_name(name + NEXT).exists():
            raise HomeError(f"A rotation of {path} was interrupted: run `headgate secrets rotate-master-key` again.")

    def read_secret(self, name: str, *, may_be_rotating: bool = False) -> bytes:
        """Reads `pepper` or `master.key`. After a rotation the older peppers follow. Raises `HomeError`."""
        path = self.root / "secrets" / name
        if not may_be_rotating:
            self.refuse_open_rotation(name)
        try:
            value = path.read_bytes()
        except OSError as error:
            raise HomeError(f"The key file {path} cannot be read: {error.strerror}.") from None
        if not value or len(value) % SECRET_BYTES or (name != "pepper" and len(value) != SECRET_BYTES):
            raise HomeError(f"The key file {path} is damaged: {len(value)} bytes instead of {SECRET_BYTES}.")
        return value

    def runs_as(self) -> int | None:
        """Returns the process id of the `headgate up` that runs in this home, or None."""
        try:
            with (self.root / "run" / "up.lock").open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return int((self.root / "run" / "up.lock").read_text() or 0) or None
        except OSError:
            return None
        return None

    def lock(self) -> int:
        """Locks the home for the life of the process; the returned descriptor must stay open. Raises `HomeError`."""
        path = self.root / "run" / "up.lock"
        with usable(self.root):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.read(fd, 32).decode() or "unknown"
            os.close(fd)
            raise HomeError(
                f"Another `headgate up` (pid {pid}) already runs in {self.root}. Stop it by SIGTERM, or name another home"
                " with --home."
            ) from None
        with usable(self.root):
            os.ftruncate(fd, 0)
            os.write(fd, str(os.getpid()).encode())
        return fd


def _fits(directory: Path) -> bool:
    """Says whether the paths of sockets in a directory are short enough."""
    return len(os.fsencode(directory)) + len(LONGEST_SOCKET_NAME) <= SOCKET_PATH_MAX


def why_no_home(root: Path) -> str | None:
    """Says why a path can be no home, in words that follow its name; None for a directory, and for one that can be made."""
    for path in (root, *root.parents):
        try:
            mode = path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        if stat.S_ISDIR(mode):
            return None
        return "is a file" if path == root else f"lies below the file {path}"
    return None


@contextmanager
def usable(root: Path) -> Iterator[None]:
    """Guards every write in a home. A directory that is read-only, full or owned by another user becomes one sentence.
    Raises `HomeError`.
    """
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise HomeError(
            f"The state directory {root} cannot be used: {error.strerror}{where}; give a directory that can be written "
            "with --home or HEADGATE_HOME."
        ) from None


def _write_secret_once(path: Path) -> None:
    """A secret is drawn only once: a new one would invalidate every key and every encrypted file."""
    if path.exists():
        return
    write_private(path, secrets.token_bytes(SECRET_BYTES))


def write_private(path: Path, content: bytes) -> None:
    """Replaces `path` atomically and durably, with mode 0600. Raises `HomeError`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise HomeError(f"The file {path} cannot be written: {error.strerror}.") from None
