"""What is this machine, and how much of it may this process use?

In: `/proc`, `/sys`, the environment, and CUDA's driver where there is one. Out: a `Machine` record. Needs no framework.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

from flatout.machine.control_groups import cores_quota, memory_limit_bytes, text_of
from flatout.machine.cuda_devices import read_accelerators
from flatout.machine.numa_nodes import numa_nodes, parse_cpu_list
from flatout.records.ceilings import Machine

CPU_FEATURES = (
    # x86, as in the `flags` line of /proc/cpuinfo
    *("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx_vnni", "avx512_vnni", "avx512_bf16"),
    *("avx512_fp16", "amx_tile", "amx_bf16", "amx_fp16", "amx_int8"),
    # ARM, as in the `Features` line
    *("asimd", "asimdhp", "asimddp", "sve", "sve2", "i8mm", "bf16", "svebf16"),
)
"""The processor features that decide which matrix kernels a library picks; all others are left out."""


def read_machine(*, root: Path = Path("/")) -> Machine:
    """This machine, as far as this process may use it.

    Takes milliseconds without a GPU; with one, as long as CUDA takes to start.

    Args:
        root: Where `/proc`, `/sys` and `/dev` are looked for; tests pass a recorded tree.
    """
    cpuinfo = text_of(root / "proc/cpuinfo")
    allowed = allowed_cpus()
    quota = cores_quota(root)
    num_cores = max(1, min(len(allowed), int(quota))) if quota else len(allowed)
    total = re.search(r"^MemTotal:\s+(\d+) kB", text_of(root / "proc/meminfo"), re.MULTILINE)
    memory_bytes = int(total[1]) * 1024 if total else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit_bytes = memory_limit_bytes(root)
    shm_bytes = None
    with contextlib.suppress(OSError):
        shm = os.statvfs(root / "dev/shm")
        shm_bytes = shm.f_blocks * shm.f_frsize
    nodes = numa_nodes(allowed, os.environ, root)
    return Machine(
        hostname=platform.node(),
        cpu=cpu_name(cpuinfo) or platform.processor() or platform.machine(),
        architecture=platform.machine(),
        num_cores=num_cores,
        num_physical_cores=min(num_cores, len({_first_sibling(root, cpu) for cpu in allowed})),
        num_cores_total=os.cpu_count() or len(allowed),
        cores_quota=quota,
        memory_bytes=memory_bytes,
        memory_limit_bytes=limit_bytes if limit_bytes and limit_bytes < memory_bytes else None,
        last_level_cache_bytes=_last_level_cache_bytes(root, allowed),
        cpu_features=cpu_features(cpuinfo),
        accelerators=read_accelerators(root),
        numa_nodes=tuple(nodes) if len(nodes) > 1 else (),
        cxx_compiler=cxx_compiler(os.environ),
        shm_bytes=shm_bytes,
        operating_system=f"{platform.system()} {platform.release()}",
    )


def allowed_cpus() -> frozenset[int]:
    """The logical processors in this process's affinity; all of them where there is none, or none may be asked for."""
    with contextlib.suppress(OSError, AttributeError):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


# -- processor -----------------------------------------------------------------------------------------------------


def cpu_name(cpuinfo: str) -> str | None:
    r"""The processor's readable name in the text of `/proc/cpuinfo`; None where it has none (most ARM kernels).

    >>> cpu_name("processor : 0\nmodel name : Intel(R) Xeon(R) Platinum 8480+ CPU @ 2.00GHz")
    'Intel Xeon Platinum 8480+'
    >>> cpu_name("model name : AMD EPYC 9654 96-Core Processor")
    'AMD EPYC 9654'
    """
    value = _cpuinfo_value(cpuinfo, "model name") or _cpuinfo_value(cpuinfo, "Model")
    if value is None:
        return None
    value = re.sub(r"\((R|TM|tm|r)\)|@.*|\bCPU\b|\bProcessor\b|\b\d+-Core\b", " ", value)
    return " ".join(value.split()) or None


def cpu_features(cpuinfo: str) -> tuple[str, ...]:
    """Those of `CPU_FEATURES` that the text of `/proc/cpuinfo` names, in that order.

    >>> cpu_features("flags : fpu avx512_bf16 avx2 sse")
    ('avx2', 'avx512_bf16')
    """
    line = _cpuinfo_value(cpuinfo, "flags") or _cpuinfo_value(cpuinfo, "Features") or ""
    found = set(line.split())
    return tuple(feature for feature in CPU_FEATURES if feature in found)


def _cpuinfo_value(cpuinfo: str, key: str) -> str | None:
    found = re.search(rf"^{re.escape(key)}\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return found.group(1).strip() if found else None


def _first_sibling(root: Path, cpu: int) -> int:
    """The first hardware thread of its core; a processor itself where the kernel does not say."""
    siblings = text_of(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return min(parse_cpu_list(siblings), default=cpu)


def _last_level_cache_bytes(root: Path, allowed: Collection[int]) -> int | None:
    """The last caches that the allowed processors share, added up; None where the kernel does not say."""
    sizes: dict[str, int] = {}
    for cpu in allowed:
        levels = {}
        for folder in (root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index*"):
            size = re.match(r"(\d+)K", text_of(folder / "size"))
            level = text_of(folder / "level").strip()
            if size and level.isdigit():
                levels[int(level)] = (text_of(folder / "shared_cpu_list").strip(), int(size.group(1)) * 1024)
        if levels:
            shared, size_bytes = levels[max(levels)]
            sizes[shared] = size_bytes
    return sum(sizes.values()) or None


# -- compiler -------------------------------------------------------------------------------------------------------


def cxx_compiler(environment: Mapping[str, str]) -> str | None:
    """The path of the C++ compiler for compiled models: `$CXX` where set, else `g++`, else `clang++`; None without.

    Inductor by itself tries `$CXX` or `g++` (on macOS `clang++`), so that a lone `clang++` on Linux has to be named
    in `$CXX`.
    """
    try:
        wanted = shlex.split(environment.get("CXX", ""))[:1]
    except ValueError:  # a quotation mark that is never closed: nothing that could be started
        return None
    names = wanted or (["clang++", "g++"] if sys.platform == "darwin" else ["g++", "clang++"])
    return next((path for path in map(shutil.which, names) if path), None)
