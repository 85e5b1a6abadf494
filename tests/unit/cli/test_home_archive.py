"""A backup holds what it says, refuses to replace anything, and notices every changed byte."""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
import tarfile
from pathlib import Path

import pytest

from gateway.base.home import Home, HomeError
from gateway.cli import home_archive
from gateway.cli.home_archive import FORMAT, Manifest

NAMES = {
    "home/secrets/pepper",
    "home/secrets/master.key",
    "home/files/a/b",
    "state/gateway-0/journal/" + "0" * 19 + "1.journal",
}


def manifest(**more) -> Manifest:
    given = {"format": FORMAT, "headgate": "0.1.0", "taken_at": 1, "database": "sqlite", "revision": None, "sha256": {}}
    return Manifest(**{**given, **more})


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.delenv("HEADGATE_STATE_DIR", raising=False)
    place = Home(tmp_path / "home")
    place.prepare()
    (place.root / "files" / "a").mkdir()
    (place.root / "files" / "a" / "b").write_bytes(b"sealed")
    journal = place.state / "gateway-0" / "journal"
    journal.mkdir(parents=True)
    (journal / f"{1:020}.journal").write_bytes(b"records")
    (journal / "lock").touch()
    (journal / "ballast").write_bytes(b"0" * 1000)
    (place.logs / "gateway-0.log").write_text("not kept")
    return place


def packed(home: Home, path: Path) -> Path:
    with home_archive.held_sources(home) as sources:
        sources.note()
        home_archive.pack(path, manifest(), sources.members)
    return path


def test_it_has_secrets_files_and_journals_and_neither_locks_nor_logs_nor_ballast(home, tmp_path):
    path = packed(home, tmp_path / "b.tar")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with home_archive.opened(path) as (tar, told):
        assert set(told.sha256) == NAMES
        home_archive.unpack(tar, told, tmp_path / "out")
    for name in NAMES:
        assert stat.S_IMODE((tmp_path / "out" / name).stat().st_mode) == 0o600
    assert (tmp_path / "out" / "home/files/a/b").read_bytes() == b"sealed"
    assert not list(home.root.glob(".backup-*"))


def test_a_segment_that_is_deleted_while_the_backup_is_taken_is_still_in_it(home, tmp_path):
    segment = home.state / "gateway-0" / "journal" / f"{1:020}.journal"
    with home_archive.held_sources(home) as sources:
        sources.note()
        segment.unlink()
        (segment.parent / f"{9:020}.journal").write_bytes(b"newer")
        sources.note()
        told = home_archive.pack(tmp_path / "b.tar", manifest(), sources.members)
    kept = {name.rpartition("/")[2] for name in told.sha256 if name.startswith("state/")}
    assert kept == {f"{1:020}.journal", f"{9:020}.journal"}


def test_a_journal_is_packed_as_long_as_it_was_when_it_was_noted_last(home, tmp_path):
    segment = home.state / "gateway-0" / "journal" / f"{1:020}.journal"
    with home_archive.held_sources(home) as sources:
        sources.note()
        with segment.open("ab") as file:
            file.write(b" and more")
        segment.rename(tmp_path / "moved")  # it is gone, and has grown before
        sources.note()
        with (tmp_path / "moved").open("ab") as file:
            file.write(b", and what came after")
        home_archive.pack(tmp_path / "b.tar", manifest(), sources.members)
    with tarfile.open(tmp_path / "b.tar") as tar:
        assert tar.extractfile(f"state/gateway-0/journal/{1:020}.journal").read() == b"records and more"


def test_where_links_cannot_be_made_the_second_look_copies_what_has_grown(home, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(18, "Invalid cross-device link")

    segment = home.state / "gateway-0" / "journal" / f"{1:020}.journal"
    with home_archive.held_sources(home) as sources:
        monkeypatch.setattr(os, "link", refuse)
        sources.note()
        segment.write_bytes(b"records and more")
        sources.note()
        monkeypatch.undo()
        home_archive.pack(tmp_path / "b.tar", manifest(), sources.members)
    with tarfile.open(tmp_path / "b.tar") as tar:
        assert tar.extractfile(f"state/gateway-0/journal/{1:020}.journal").read() == b"records and more"


def test_files_of_another_mount_are_held_there_and_no_byte_of_them_is_copied(home, tmp_path, monkeypatch):
    mount, link = home.root / "files", os.link
    (mount / ".backup-killed").mkdir()
    (mount / ".backup-killed" / "0").write_bytes(b"held by another backup")

    def within_a_mount(source, target):
        if Path(source).is_relative_to(mount) != Path(target).is_relative_to(mount):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        link(source, target)

    monkeypatch.setattr(os, "link", within_a_mount)
    monkeypatch.setattr(shutil, "copyfile", lambda *_: pytest.fail("a file was copied"))
    with home_archive.held_sources(home) as sources:
        sources.note()
        (mount / "a" / "b").unlink()
        (mount / "a" / "c").write_bytes(b"newer")
        sources.note()
        told = home_archive.pack(tmp_path / "b.tar", manifest(), sources.members)
    assert told.sha256.keys() == NAMES | {"home/files/a/c"}
    assert {path.name for path in mount.iterdir()} == {"a", ".backup-killed"}


def test_a_file_that_exists_is_not_replaced(home, tmp_path):
    (tmp_path / "b.tar").write_text("mine")
    with pytest.raises(HomeError, match="nothing is overwritten"):
        packed(home, tmp_path / "b.tar")
    assert (tmp_path / "b.tar").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".b")] == []


def test_one_changed_byte_is_found(home, tmp_path):
    path = packed(home, tmp_path / "b.tar")
    path.write_bytes(path.read_bytes().replace(b"sealed", b"sealex"))
    with home_archive.opened(path) as (tar, told), pytest.raises(HomeError, match="files/a/b"):
        home_archive.unpack(tar, told, None)


@pytest.mark.parametrize("name", ["../outside", "/etc/outside", "home/../../outside"])
def test_a_name_that_leads_elsewhere_is_refused(tmp_path, name):
    path = tmp_path / "evil.tar"
    with tarfile.open(path, "w") as tar:
        told = manifest(sha256={name: "0" * 64})
        for member, content in ((name, b"x"), ("manifest.json", home_archive.msgspec.json.encode(told))):
            info = tarfile.TarInfo(member)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    with home_archive.opened(path) as (tar, found), pytest.raises(HomeError, match="not a file of a home"):
        home_archive.unpack(tar, found, tmp_path / "deep" / "out")
    assert not (tmp_path / "outside").exists()


@pytest.mark.parametrize("content", [b"", b"not a tar", b"\0" * 10240])
def test_what_is_no_backup_is_one_sentence(tmp_path, content):
    (tmp_path / "b.tar").write_bytes(content)
    with pytest.raises(HomeError, match="not a backup of Headgate"), home_archive.opened(tmp_path / "b.tar"):
        pass


def test_a_later_form_is_refused(home, tmp_path):
    with home_archive.held_sources(home) as sources:
        home_archive.pack(tmp_path / "b.tar", manifest(format=2), sources.members)
    with pytest.raises(HomeError, match="has form 2"), home_archive.opened(tmp_path / "b.tar"):
        pass
