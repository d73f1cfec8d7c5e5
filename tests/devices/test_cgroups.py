"""Limits of control groups, from trees of files as kernels show them."""

from __future__ import annotations

import pytest

from tureen.devices import cgroups, cpu

V1_UNLIMITED = "9223372036854771712\n"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Makes the files below /proc and /sys. `groups`: folder -> file -> text."""

    def make(membership, groups, available_kib=100_000, total_kib=200_000):
        (tmp_path / "cgroup").write_text(membership)
        (tmp_path / "meminfo").write_text(f"MemTotal: {total_kib} kB\nMemAvailable: {available_kib} kB\n")
        for folder, files in groups.items():
            (tmp_path / "sys" / folder).mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (tmp_path / "sys" / folder / name).write_text(text)
        monkeypatch.setattr(cgroups, "MEMBERSHIP", tmp_path / "cgroup")
        monkeypatch.setattr(cgroups, "MOUNTS", tmp_path / "sys")
        monkeypatch.setattr(cpu, "MEMINFO", tmp_path / "meminfo")

    return make


def v2(limit, used=0, inactive=0):
    return {
        "memory.max": f"{limit}\n",
        "memory.current": f"{used}\n",
        "memory.stat": f"anon 5\ninactive_file {inactive}\n",
    }


def v1(limit, used=0, inactive=0):
    return {
        "memory.limit_in_bytes": f"{limit}\n".replace("\n\n", "\n"),
        "memory.usage_in_bytes": f"{used}\n",
        "memory.stat": f"inactive_file 1\ntotal_inactive_file {inactive}\n",
    }


def test_memory_max_of_systemd_is_that_of_a_nested_group(tree):
    tree(
        "0::/system.slice/tureen.service\n",
        {
            "system.slice/tureen.service": v2(5000, 3000, 500),
            "system.slice": v2("max"),
            ".": {"cgroup.procs": ""},
        },
    )
    assert cpu.total_bytes() == 5000
    assert cpu.free_bytes() == 2500


def test_of_nested_groups_the_tightest_counts_for_each_figure(tree):
    tree("0::/a/b\n", {"a/b": v2(9000, 1000), "a": v2(7000, 6500), ".": {}})
    assert cpu.total_bytes() == 7000
    assert cpu.free_bytes() == 500


def test_in_a_container_with_a_namespace_of_its_own_the_root_has_the_limit(tree):
    tree("0::/\n", {".": v2(5000, 3000, 500)})
    assert (cpu.total_bytes(), cpu.free_bytes()) == (5000, 2500)


def test_version_1_with_nested_groups(tree):
    tree(
        "11:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n1:name=systemd:/docker/x\n",
        {
            "memory/docker/x": v1(6000, 2000, 100),
            "memory/docker": v1(V1_UNLIMITED.strip(), 10),
            "memory": v1(V1_UNLIMITED.strip(), 10),
        },
    )
    assert (cpu.total_bytes(), cpu.free_bytes()) == (6000, 4100)


def test_version_1_in_a_container_that_sees_its_own_group_as_the_root(tree):
    tree("4:memory:/docker/of/the/host\n", {"memory": v1(6000, 2000)})
    assert (cpu.total_bytes(), cpu.free_bytes()) == (6000, 4000)


def test_both_versions_at_once(tree):
    tree(
        "4:memory:/a\n0::/b\n",
        {
            "memory/a": v1(6000),
            "memory": v1(V1_UNLIMITED.strip()),
            "unified/b": v2(8000),
            "unified": {"cgroup.procs": ""},
        },
    )
    assert cpu.total_bytes() == 6000


@pytest.mark.parametrize("membership", ["0::/\n", "4:memory:/a\n", "", "0::/gone\n"])
def test_without_limits_the_machine_counts(tree, membership):
    tree(membership, {".": {}})
    assert (cpu.total_bytes(), cpu.free_bytes()) == (200_000 << 10, 100_000 << 10)


def test_a_group_over_its_limit_has_nothing_left(tree):
    tree("0::/\n", {".": v2(5000, 6000)})
    assert cpu.free_bytes() == 0


def test_files_that_make_no_sense_are_no_limit(tree):
    tree("0::/a\n", {"a": {"memory.max": "5000\n"}, ".": v2(7000)})
    assert cpu.total_bytes() == 7000


def test_processors_of_nested_groups(tree, monkeypatch):
    monkeypatch.setattr(cpu.os, "sched_getaffinity", lambda pid: set(range(8)))
    tree("0::/a/b\n", {"a/b": {"cpu.max": "max 100000\n"}, "a": {"cpu.max": "250000 100000\n"}})
    assert cpu.num_threads() == 3


def test_processors_of_version_1(tree, monkeypatch):
    monkeypatch.setattr(cpu.os, "sched_getaffinity", lambda pid: set(range(8)))
    files = {"cpu.cfs_quota_us": "150000\n", "cpu.cfs_period_us": "100000\n"}
    tree(
        "3:cpu,cpuacct:/a\n",
        {"cpu,cpuacct/a": files, "cpu,cpuacct": {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "1\n"}},
    )
    assert cpu.num_threads() == 2
