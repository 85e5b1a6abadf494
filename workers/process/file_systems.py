"""The kind of the file system that a directory is on. Journals need real locks, which a network file system does not have."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

MOUNTS = Path("/proc/mounts")
OF_A_NETWORK = frozenset(
    ["nfs", "nfs4", "cifs", "smb3", "smbfs", "fuse.sshfs", "glusterfs", "fuse.glusterfs", "ceph", "lustre", "afs"]
)
"""Not 9p: in a sandboxed container (gVisor) it is the disk of the machine itself."""
REMEDY = "Use a local disk: locks and journals need one."


def on_a_network(directories: Iterable[Path]) -> str:
    """Says which of the directories, or of those that they will be made in, is on a network file system. Returns an empty
    text if none is.
    """
    for directory in directories:
        path = directory.resolve()
        kind = _kind(path)
        if kind in OF_A_NETWORK:
            return f"{path} is on {kind}, a network file system"
    return ""


def _kind(path: Path) -> str:
    """Returns the kind of the file system, or an empty text where the system does not tell."""
    best, kind = "", ""
    try:
        mounts = MOUNTS.read_text().splitlines()
    except OSError:
        return ""
    for line in mounts:
        _, at, found, *_ = line.split()
        if path.is_relative_to(at) and len(at) >= len(best):
            best, kind = at, found
    return kind
