"""A container's limits of memory and cores are what a worker may use, whatever the host has."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from worker import host

GIB = 1 << 30


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host of 256 GiB and 64 cores, whose control groups lie in a folder."""
    monkeypatch.setattr(host, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(host, "MINE", tmp_path / "mine")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=256 * GIB, available=200 * GIB))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))


def group(tmp_path: Path, mine: str, folder: str, **files: str) -> None:
    (tmp_path / "mine").write_text(mine)
    place = tmp_path / "groups" / folder
    place.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (place / name.replace("__", ".")).write_text(text)


def test_without_control_groups_it_is_the_host() -> None:
    assert host.memory() == host.Memory(256 * GIB, 200 * GIB) and host.cores() == 64


def test_version_2_limits_memory_and_cores(tmp_path: Path) -> None:
    """What files take up in memory can be had; the group above is wider."""
    stat = f"anon {4 * GIB}\ninactive_file {GIB}\nactive_file {GIB}\n"
    files = {"memory__max": f"{16 * GIB}\n", "memory__current": f"{6 * GIB}\n", "memory__stat": stat}
    group(tmp_path, "0::/pod/mine\n", "pod/mine", **files, cpu__max="400000 100000\n")
    group(
        tmp_path,
        "0::/pod/mine\n",
        "pod",
        memory__max=f"{32 * GIB}",
        memory__current=f"{6 * GIB}",
        cpu__max="max 100000",
    )
    assert host.memory() == host.Memory(16 * GIB, 12 * GIB) and host.cores() == 4


def test_the_group_around_ours_may_be_narrower(tmp_path: Path) -> None:
    group(tmp_path, "0::/pod/mine\n", "pod/mine", memory__max="max", memory__current=f"{GIB}")
    group(
        tmp_path,
        "0::/pod/mine\n",
        "pod",
        memory__max=f"{8 * GIB}",
        memory__current=f"{7 * GIB}",
        cpu__max="50000 100000",
    )
    assert host.memory() == host.Memory(8 * GIB, GIB)
    assert host.cores() == 1, "at least one, also where half of one is allowed"


def test_version_1_limits_memory_and_cores(tmp_path: Path) -> None:
    """In a container the path is the host's, and its own group is mounted as the root."""
    mine = "5:memory:/docker/abc\n4:cpuacct,cpu:/docker/abc\n"
    memory = {"memory__limit_in_bytes": f"{4 * GIB}", "memory__usage_in_bytes": f"{2 * GIB}"}
    group(tmp_path, mine, "memory", **memory, memory__stat=f"total_inactive_file {GIB}\n")
    group(tmp_path, mine, "cpu", cpu__cfs_quota_us="200000", cpu__cfs_period_us="100000")
    assert host.memory() == host.Memory(4 * GIB, 3 * GIB) and host.cores() == 2
    group(tmp_path, mine, "memory", memory__limit_in_bytes="9223372036854771712")
    group(tmp_path, mine, "cpu", cpu__cfs_quota_us="-1")
    assert host.memory() == host.Memory(256 * GIB, 200 * GIB) and host.cores() == 64
