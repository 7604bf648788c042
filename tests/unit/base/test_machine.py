# SPDX-License-Identifier: Apache-2.0
"""What a process may take of its machine: memory and processors, as /proc and control groups of both versions say."""
import ctypes
import os

import pytest


def tree(root, cgroup, files, available_kb=8 << 20):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemFree: 5 kB\nMemAvailable:   {available_kb} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


GIB = 1 << 30
V2 = "0::/job/rank\n"
V1 = "9:name=systemd:/\n4:cpu,memory:/job\n0::/\n"


@pytest.mark.parametrize("cgroup, files, want", [
    ("", {}, 8 * GIB), (V2, {}, 8 * GIB),
    (V2, {"job/rank/memory.max": "max", "job/rank/memory.current": "5"}, 8 * GIB),
    (V2, {"job/rank/memory.max": f"{3 * GIB}\n", "job/rank/memory.current": f"{GIB}\n"}, 2 * GIB),
    (V2, {"job/rank/memory.max": str(3 * GIB), "job/rank/memory.current": str(2 * GIB),
          "job/rank/memory.stat": f"anon 5\ninactive_file {GIB}\nx 1\n"}, 2 * GIB),
    (V2, {"job/rank/memory.max": str(3 * GIB), "job/rank/memory.current": "0",
          "job/memory.max": str(2 * GIB), "job/memory.current": str(GIB)}, GIB),
    (V2, {"memory.max": str(5 * GIB), "memory.current": str(GIB)}, 4 * GIB),
    ("0::/\n", {"memory.max": str(5 * GIB), "memory.current": str(6 * GIB)}, 0),
    ("0::/\n", {"memory.max": str(50 * GIB), "memory.current": "0"}, 8 * GIB),
    (V1, {"memory/job/memory.limit_in_bytes": str(3 * GIB), "memory/job/memory.usage_in_bytes": str(2 * GIB),
          "memory/job/memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB // 2}\n"}, 3 * GIB // 2),
    ("4:cpu,memoryx:/job\n", {"memory/job/memory.limit_in_bytes": "1", "memory/job/memory.usage_in_bytes": "0"},
     8 * GIB),
    ("broken\n\n:\n", {"memory.max": "words", "memory.current": "0"}, 8 * GIB),
])
def test_free_memory_is_the_least_of_machine_and_groups(lib, tmp_path, cgroup, files, want):
    tree(tmp_path, cgroup, files)
    lib.base_machine_memory.restype = ctypes.c_uint64
    assert lib.base_machine_memory(os.fsencode(tmp_path)) == want


def test_free_memory_of_this_machine(lib):
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")
    lib.base_machine_memory.restype = ctypes.c_uint64
    assert 0 < lib.base_machine_memory(b"") <= total
    assert lib.base_machine_memory(b"/nowhere") == 0


NO_LIMIT = (1 << 64) - 1


@pytest.mark.parametrize("cgroup, files, want", [
    ("", {}, NO_LIMIT), (V2, {"job/rank/memory.max": "max\n"}, NO_LIMIT),
    (V2, {"job/rank/memory.max": str(3 * GIB), "job/memory.max": str(2 * GIB)}, 2 * GIB),
    (V1, {"memory/job/memory.limit_in_bytes": str(3 * GIB)}, 3 * GIB),
    (V1, {"memory/job/memory.limit_in_bytes": str((1 << 63) - 4096)}, NO_LIMIT),
    ("0::/\n", {"memory.max": "1\n"}, 1), ("broken\n\n:\n", {"memory.max": "words"}, NO_LIMIT),
])
def test_the_least_limit_of_the_groups(lib, tmp_path, cgroup, files, want):
    tree(tmp_path, cgroup, files)
    lib.base_machine_memory_limit.restype = ctypes.c_uint64
    assert lib.base_machine_memory_limit(os.fsencode(tmp_path)) == want


V1_CPU = "5:cpu,cpuacct:/job\n4:memory:/job\n"


@pytest.mark.parametrize("cgroup, files, want", [
    ("", {}, NO_LIMIT), (V2, {}, NO_LIMIT), (V2, {"job/rank/cpu.max": "max 100000\n"}, NO_LIMIT),
    (V2, {"job/rank/cpu.max": "200000 100000\n"}, 2), (V2, {"job/rank/cpu.max": "250000 100000\n"}, 3),
    (V2, {"job/rank/cpu.max": "800000 100000\n", "job/cpu.max": "150000 50000\n"}, 3),
    (V2, {"cpu.max": "1000 100000\n"}, 1),
    (V1_CPU, {"cpu/job/cpu.cfs_quota_us": "400000\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, 4),
    (V1_CPU, {"cpu/job/cpu.cfs_quota_us": "-1\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, NO_LIMIT),
    (V1_CPU, {"cpu/job/cpu.cfs_quota_us": "400000\n"}, NO_LIMIT), (V2, {"cpu.max": "5 0"}, NO_LIMIT),
    (V2, {"cpu.max": "words"}, NO_LIMIT),
])
def test_processors_are_the_least_of_all_groups(lib, tmp_path, cgroup, files, want):
    tree(tmp_path, cgroup, files)
    lib.base_machine_cpus.restype = ctypes.c_uint64
    assert lib.base_machine_cpus(os.fsencode(tmp_path)) == want
