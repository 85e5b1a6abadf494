"""The memory that is free, by made-up files of a kernel."""

from __future__ import annotations

from pathlib import Path

from workers.process.free_memory import free_memory

GIB = 1 << 30
NO_LIMIT = "9223372036854771712"


def write(root: Path, **files: str | int) -> None:
    for name, content in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


def machine(root: Path, groups: str, gib: int = 200) -> None:
    write(root, proc__meminfo=f"MemTotal: 9 kB\nMemAvailable:    {gib << 20} kB", proc__self__cgroup=groups)


def limit(group: Path, most: int | str, used: int, stat: str = "anon 5\nfile 7") -> None:
    write(group, **{"memory.max": most, "memory.current": used, "memory.stat": stat})


def test_the_kernel_says_it_or_nobody_knows(tmp_path: Path) -> None:
    assert free_memory(tmp_path) is None
    machine(tmp_path, "0::/")
    assert free_memory(tmp_path) == 200 * GIB


def test_a_limit_of_the_own_group_or_of_one_around_it_leaves_less(tmp_path: Path) -> None:
    machine(tmp_path, "0::/pods/pod/worker")
    pod = tmp_path / "sys/fs/cgroup/pods/pod"
    limit(pod / "worker", "max", GIB)
    assert free_memory(tmp_path) == 200 * GIB
    limit(pod, 8 * GIB, 3 * GIB)
    assert free_memory(tmp_path) == 5 * GIB
    limit(pod / "worker", 4 * GIB, 5 * GIB)
    assert free_memory(tmp_path) == 0


def test_a_container_whose_group_has_another_path_on_the_host_has_its_limit(tmp_path: Path) -> None:
    machine(tmp_path, "0::/pods/pod/worker")
    limit(tmp_path / "sys/fs/cgroup", 4 * GIB, GIB)
    assert free_memory(tmp_path) == 3 * GIB


def test_cached_files_are_no_memory_that_is_used(tmp_path: Path) -> None:
    machine(tmp_path, "0::/")
    limit(tmp_path / "sys/fs/cgroup", 4 * GIB, 4 * GIB, f"inactive_file {GIB}\nactive_file {2 * GIB}\nshmem 9")
    assert free_memory(tmp_path) == 3 * GIB


def test_groups_of_the_first_version_count_too(tmp_path: Path) -> None:
    machine(tmp_path, "5:cpu,cpuacct:/a\n4:hugetlb,memory:/a\n0::/a")
    files = {"memory.limit_in_bytes": NO_LIMIT, "memory.usage_in_bytes": 9}
    write(tmp_path / "sys/fs/cgroup/memory", **files)
    assert free_memory(tmp_path) == 200 * GIB
    stat = f"inactive_file 5\nactive_file 5\ntotal_inactive_file {GIB}\ntotal_active_file 0"
    files = {"memory.limit_in_bytes": 6 * GIB, "memory.usage_in_bytes": 3 * GIB, "memory.stat": stat}
    write(tmp_path / "sys/fs/cgroup/memory/a", **files)
    assert free_memory(tmp_path) == 4 * GIB
