from __future__ import annotations

from pathlib import Path

import pytest

from edge_runtime.cpus import allowed_affinity, cgroup_quota, has_vnni, usable_cpus


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


V2 = {"proc/self/cgroup": "0::/system.slice/edge.service\n"}


@pytest.mark.parametrize(
    ("files", "affinity", "expected"),
    [
        ({}, 8, 8),
        (V2, 8, 8),
        (V2 | {"sys/fs/cgroup/system.slice/edge.service/cpu.max": "150000 100000\n"}, 8, 2),
        (V2 | {"sys/fs/cgroup/system.slice/cpu.max": "50000 100000\n"}, 8, 1),
        (V2 | {"sys/fs/cgroup/cpu.max": "max 100000\n"}, 8, 8),
        (V2 | {"sys/fs/cgroup/cpu.max": "800000 100000\n"}, 1, 1),
        ({"proc/self/cgroup": "0::/../../outside\n", "sys/fs/cgroup/cpu.max": "300000 100000"}, 8, 3),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/docker/1\n4:memory:/x\n",
                "sys/fs/cgroup/cpu/docker/1/cpu.cfs_quota_us": "250000\n",
                "sys/fs/cgroup/cpu/docker/1/cpu.cfs_period_us": "100000\n",
            },
            8,
            3,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            4,
            4,
        ),
    ],
)
def test_er_01_threads_follow_affinity_and_quota(
    tmp_path: Path, files: dict[str, str], affinity: int, expected: int
) -> None:
    assert usable_cpus(affinity, write(tmp_path, files)) == expected


def test_this_machine_gives_a_sane_answer() -> None:
    assert 1 <= usable_cpus(allowed_affinity()) <= 4096
    assert cgroup_quota(Path("/")) is None or cgroup_quota(Path("/")) > 0  # type: ignore[operator]


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("flags\t\t: fpu avx2 avx512_vnni\n", True),
        ("flags\t\t: fpu avx2 avx_vnni\n", True),
        ("flags\t\t: fpu avx2 avx512f\n", False),
        ("Features\t: fp asimd\n", True),
        ("", True),
    ],
)
def test_vnni_is_looked_for_where_there_are_x86_flags(tmp_path: Path, cpuinfo: str, expected: bool) -> None:
    assert has_vnni(write(tmp_path, {"proc/cpuinfo": cpuinfo})) is expected
