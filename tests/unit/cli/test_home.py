from __future__ import annotations

import errno
import os
import stat

import pytest

from gateway.base.home import SOCKET_PATH_MAX, Home, HomeError, write_private
from gateway.configuration.place import find


def test_everything_private_is_private(tmp_path):
    home = Home(tmp_path / "home")
    home.prepare()
    for name in ("pepper", "master.key"):
        path = home.root / "secrets" / name
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert len(home.read_secret(name)) == 32
    assert stat.S_IMODE(home.root.stat().st_mode) == 0o700
    assert home.read_secret("pepper") != home.read_secret("master.key")


def test_secrets_are_drawn_once_for_ever(tmp_path):
    home = Home(tmp_path)
    home.prepare()
    before = home.read_secret("pepper")
    home.prepare()
    assert home.read_secret("pepper") == before


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 33])
def test_a_damaged_secret_is_named_and_never_replaced(tmp_path, content):
    home = Home(tmp_path)
    home.prepare()
    (tmp_path / "secrets/pepper").write_bytes(content)
    home.prepare()
    with pytest.raises(HomeError, match="pepper"):
        home.read_secret("pepper")


def test_a_home_that_is_a_file_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HomeError, match="cannot be used"):
        Home(tmp_path / "file").prepare()


def test_a_home_is_held_by_one_process(tmp_path):
    home = Home(tmp_path)
    home.prepare()
    fd = home.lock()
    with pytest.raises(HomeError, match=rf"pid {os.getpid()}.* name another home with --home"):
        home.lock()
    os.close(fd)
    os.close(home.lock())


@pytest.mark.parametrize("what", ["lock", "credentials", "ready file elsewhere"])
def test_b5_a_home_that_cannot_be_written_is_one_sentence(tmp_path, monkeypatch, what):
    """As on a file system that was mounted read-only after the home was made."""
    home = Home(tmp_path)
    home.prepare()
    real = os.open

    def read_only(path, flags, *more, **options):
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", read_only)
    home.prepare()  # everything is there
    write = {
        "lock": home.lock,
        "credentials": lambda: write_private(home.credentials, b"{}"),
        "ready file elsewhere": lambda: write_private(tmp_path / "ready.json", b"{}"),
    }[what]
    with pytest.raises(HomeError, match="Read-only file system") as found:
        write()
    assert str(tmp_path) in str(found.value)


def test_b5_a_home_without_room_for_secrets_is_one_sentence(tmp_path):
    (tmp_path / "secrets").write_text("")
    with pytest.raises(HomeError, match="--home or HEADGATE_HOME"):
        Home(tmp_path).prepare()


def test_sockets_of_a_deep_home_lie_where_their_path_fits(tmp_path):
    home = Home(tmp_path / ("d" * 60) / ("e" * 60))
    home.prepare()
    run = home.run
    assert len(os.fsencode(run / "gateway-999.sock")) <= SOCKET_PATH_MAX
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    assert Home(home.root).run == run, "every process of this home finds the same directory"
    run.rmdir()


def test_asking_for_the_directory_of_sockets_makes_none(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    home = Home(tmp_path / ("d" * 60) / ("e" * 60))
    home.root.mkdir(parents=True)
    assert home.run == home.root / "run"
    assert [*home.root.iterdir()] == [] and [path.name for path in tmp_path.iterdir()] == ["d" * 60]


def test_a_directory_of_sockets_that_is_gone_is_made_anew_by_the_next_start(tmp_path):
    home = Home(tmp_path / ("d" * 60) / ("e" * 60))
    home.make_run()
    before = home.run
    before.rmdir()
    home.make_run()
    assert home.run.is_dir()
    home.run.rmdir()


def test_a_private_file_is_replaced_whole(tmp_path):
    path = tmp_path / "credentials.json"
    path.write_text("old")
    path.chmod(0o644)
    write_private(path, b"new")
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_another_users_home_is_named_with_what_to_do(tmp_path, monkeypatch):
    """A file in it would be reported instead, although it may not even be there."""
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(HomeError, match=r"may be used by its owner alone: run the command as that user \(`sudo -u"):
        find(tmp_path, tmp_path)
