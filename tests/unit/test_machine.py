"""What this machine is, and who else uses it: on recorded texts, and live where the law does not depend on timing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.machine import cuda_devices, foreign_cpu
from flatout.machine.control_groups import cgroup_folders, cores_quota, free_memory_bytes, memory_limit_bytes
from flatout.machine.foreign_cpu import Snapshot, fraction
from flatout.machine.numa_nodes import parse_cpu_list
from flatout.machine.read import cpu_features, cpu_name, cxx_compiler, read_machine
from flatout.records.as_json import from_json, to_json
from flatout.records.ceilings import Accelerator, Machine

needs_proc = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's /proc")

EPYC = """processor\t: 0
vendor_id\t: AuthenticAMD
model\t\t: 17
model name\t: AMD EPYC 9654 96-Core Processor
flags\t\t: fpu vme avx2 fma avx512f avx512_bf16 rdpid fsrm
"""
GRAVITON = """processor\t: 0
BogoMIPS\t: 2100.00
Features\t: fp asimd sve bf16 i8mm
CPU implementer\t: 0x41
"""
UNIFIED_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
VERSION_1_MOUNTS = (
    "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 /docker/abc /sys/fs/cgroup/cpu,cpuacct ro,nosuid master:11 - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro,nosuid master:14 - cgroup cgroup rw,memory\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
)
VERSION_1_OWN = "9:memory:/docker/abc/job\n4:cpu,cpuacct:/docker/abc/job\n1:name=systemd:/docker/abc\n0::/\n"


def tree(root, files):
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


# -- processor


def test_a_processor_is_read_from_recorded_texts_of_two_architectures():
    assert cpu_name(EPYC) == "AMD EPYC 9654"
    assert cpu_features(EPYC) == ("avx2", "fma", "avx512f", "avx512_bf16")
    assert cpu_name(GRAVITON) is None
    assert cpu_features(GRAVITON) == ("asimd", "sve", "i8mm", "bf16")
    assert cpu_features("") == ()


@given(st.sets(st.integers(0, 300), max_size=40))
def test_a_kernel_list_is_read_back(cpus):
    assert parse_cpu_list(",".join(map(str, sorted(cpus))) + "\n") == cpus


# -- control groups


def test_version_2_is_followed_up_to_the_root_and_the_tightest_limit_wins(tmp_path):
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/container\n",
            "proc/self/mountinfo": UNIFIED_MOUNT,
            "sys/fs/cgroup/pod/container/cpu.max": "max 100000\n",
            "sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/pod/container/memory.max": "1073741824\n",
            "sys/fs/cgroup/pod/memory.max": "max\n",
        },
    )
    assert cores_quota(root) == 1.5
    assert memory_limit_bytes(root) == 2**30


def test_version_1_in_a_container_is_found_although_its_own_path_is_the_hosts(tmp_path):
    assert cgroup_folders(VERSION_1_OWN, VERSION_1_MOUNTS, "cpu") == (
        PurePosixPath("/sys/fs/cgroup/cpu,cpuacct/job"),
        PurePosixPath("/sys/fs/cgroup/cpu,cpuacct"),
    )
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": VERSION_1_OWN,
            "proc/self/mountinfo": VERSION_1_MOUNTS,
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    assert cores_quota(root) == 0.5
    assert memory_limit_bytes(root) is None


@pytest.mark.parametrize("own", ["0::/", "0::/../other", "0::/elsewhere"])
def test_a_group_outside_the_mount_falls_back_to_the_mount_point(own):
    mount = UNIFIED_MOUNT.replace("0:26 / ", "0:26 /docker/abc ")
    assert cgroup_folders(own, mount, "cpu") == (PurePosixPath("/sys/fs/cgroup"),)


def test_no_quota_and_no_control_groups_are_none_and_not_zero(tmp_path):
    unlimited = {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": UNIFIED_MOUNT}
    root = tree(tmp_path / "a", {**unlimited, "sys/fs/cgroup/cpu.max": "max 100000\n"})
    assert cores_quota(root) is None
    assert cores_quota(tmp_path / "nothing") is None
    assert memory_limit_bytes(tmp_path / "nothing") is None
    assert free_memory_bytes(tmp_path / "nothing") is None


def test_free_memory_is_the_least_that_the_machine_and_each_group_leave(tmp_path):
    unlimited = {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    4000 kB\n"}
    assert free_memory_bytes(tree(tmp_path / "a", unlimited)) == 4000 * 1024
    files = {
        **unlimited,
        "proc/self/cgroup": "0::/job/step\n",
        "proc/self/mountinfo": UNIFIED_MOUNT,
        "sys/fs/cgroup/job/memory.max": "3000000\n",
        "sys/fs/cgroup/job/memory.current": "2000000\n",
        "sys/fs/cgroup/job/memory.stat": "anon 1500000\ninactive_file 400000\nactive_file 100000\n",
        "sys/fs/cgroup/job/step/memory.max": "max\n",
        "sys/fs/cgroup/job/step/memory.current": "1\n",
    }
    assert free_memory_bytes(tree(tmp_path / "b", files)) == 1400000, "files in the cache are given back first"
    files["sys/fs/cgroup/job/memory.current"] = "3500000\n"
    assert free_memory_bytes(tree(tmp_path / "c", files)) == 0


@needs_proc
@pytest.mark.parametrize(("quota", "cores"), [("50000 100000", 1), ("2600000 100000", None)])
def test_usable_cores_are_the_smaller_of_affinity_and_quota_and_at_least_one(tmp_path, quota, cores):
    root = tree(
        tmp_path,
        {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": UNIFIED_MOUNT, "sys/fs/cgroup/cpu.max": quota},
    )
    found = read_machine(root=root)
    assert found.num_cores == (cores or min(26, len(os.sched_getaffinity(0))))
    assert found.cores_quota == int(quota.split()[0]) / 100000
    assert found.num_physical_cores <= found.num_cores


@needs_proc
def test_two_hardware_threads_of_one_core_are_one_physical_core_and_share_their_cache(tmp_path):
    allowed = sorted(os.sched_getaffinity(0))
    files = {}
    for cpu in allowed:
        here = f"sys/devices/system/cpu/cpu{cpu}"
        files[f"{here}/topology/thread_siblings_list"] = ",".join(map(str, allowed))
        for index, (level, size) in enumerate([(1, "32K"), (3, "32768K")]):
            files[f"{here}/cache/index{index}/level"] = f"{level}\n"
            files[f"{here}/cache/index{index}/size"] = f"{size}\n"
            files[f"{here}/cache/index{index}/shared_cpu_list"] = ",".join(map(str, allowed))
    found = read_machine(root=tree(tmp_path, files))
    assert found.num_physical_cores == 1
    assert found.last_level_cache_bytes == 32 * 2**20


# -- accelerators and compiler


class Driver:
    """CUDA's driver with these devices: name, bytes, capability; a device without a name fails to answer."""

    def __init__(self, *found, broken=False):
        self.found, self.broken = found, broken

    def cuInit(self, flags):
        return 100 * self.broken

    def cuDeviceGetCount(self, num):
        num._obj.value = len(self.found)
        return 0

    def cuDeviceGet(self, device, number):
        device._obj.value = number
        return 0

    def cuDeviceGetName(self, name, size, device):
        found, *_ = self.found[device.value]
        name.value = found[: size - 1]
        return 0 if found else 101

    def cuDeviceTotalMem_v2(self, total, device):
        total._obj.value = self.found[device.value][1]
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):
        value._obj.value = self.found[device.value][2][attribute - cuda_devices.CAPABILITY_MAJOR]
        return 0


def test_gpus_are_what_the_driver_shows_a_slice_of_one_included():
    slice_ = (b"NVIDIA H100 80GB HBM3 MIG 3g.40gb", 42_144_366_592, (9, 0))
    found = cuda_devices.devices(Driver(slice_, (b"", 0, (0, 0)), (b"Tesla T4", 15_835_660_288, (7, 5))))
    assert [Accelerator(**one) for one in found] == [
        Accelerator(name="NVIDIA H100 80GB HBM3 MIG 3g.40gb", memory_bytes=42_144_366_592, compute_capability="9.0"),
        Accelerator(name="Tesla T4", memory_bytes=15_835_660_288, compute_capability="7.5"),
    ]
    assert cuda_devices.devices(Driver(slice_, broken=True)) == []


def test_the_driver_is_waited_for_however_slow_it_starts_and_not_asked_where_there_is_no_device(tmp_path, monkeypatch):
    asked = []

    def run(command, **options):
        asked.append(options)
        done = [{"name": "NVIDIA H200", "memory_bytes": 1, "compute_capability": "9.0"}]
        return subprocess.CompletedProcess(command, 0, stdout=json.dumps(done), stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    assert cuda_devices.read_accelerators(tmp_path) == () and not asked
    (found,) = cuda_devices.read_accelerators(tree(tmp_path, {"dev/nvidiactl": ""}))
    assert found.name == "NVIDIA H200" and "timeout" not in asked[0]


def test_a_machine_with_a_device_but_without_a_driver_has_no_gpu(tmp_path):
    if cuda_devices.read_accelerators():
        pytest.skip("here is one")
    assert cuda_devices.read_accelerators(tree(tmp_path, {"dev/nvidiactl": ""})) == ()


def test_the_compiler_is_the_named_one_or_none():
    assert cxx_compiler({"CXX": f"{sys.executable} -m compiler"}) == sys.executable
    assert cxx_compiler({"CXX": "/no/such/compiler"}) is None
    assert cxx_compiler({"CXX": '"c++'}) is None


@needs_proc
def test_this_machine_is_read_without_a_framework():
    code = """
import json, sys
from flatout.records.as_json import to_json
from flatout.machine.read import read_machine
found = read_machine()
assert not {"torch", "numpy", "jax"} & set(sys.modules), sorted(sys.modules)
print(json.dumps(to_json(found)))
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = from_json(Machine, json.loads(answer.stdout))
    assert found == read_machine()
    assert 1 <= found.num_physical_cores <= found.num_cores <= len(os.sched_getaffinity(0)) <= found.num_cores_total
    assert found.memory_bytes > 2**28
    assert to_json(found)["cpu_features"] == list(found.cpu_features)


# -- others' CPU

STAT = """cpu  1000 0 500 8000 100 10 20 30 0 0
cpu0 100 1 50 800 10 2 3 4 0 0
cpu1 200 0 60 700 20 0 1 5 50 0
cpu10 900 0 0 0 0 0 0 0 0 0
intr 115435 0 0
ctxt 224526
"""


def test_busy_ticks_are_those_of_the_allowed_processors_with_steal():
    assert foreign_cpu.busy_and_counted_ticks(STAT, {0}) == (160, 970)
    assert foreign_cpu.busy_and_counted_ticks(STAT, {0, 1}) == (160 + 266, 970 + 986)
    assert foreign_cpu.busy_and_counted_ticks(STAT, {10}) == (900, 900)
    assert foreign_cpu.busy_and_counted_ticks(STAT, {5}) is None


def test_kernels_that_report_fewer_columns_are_read():
    assert foreign_cpu.busy_and_counted_ticks("cpu0 10 20 30 40\n", {0}) == (60, 100)


def process(pid, name, session, *, own=(0, 0), reaped=(0, 0)):
    times = " ".join(map(str, (*own, *reaped)))
    return f"{pid} ({name}) R 1 {pid} {session} 0 -1 4194304 98 0 0 0 {times} 20 0 1 0 154130 3133440 359\n"


def test_own_ticks_are_those_of_the_session_with_children_that_have_ended():
    texts = [
        process(10, "python", 10, own=(100, 20), reaped=(3, 4)),
        process(11, "a) worker (", 10, own=(50, 5)),
        process(12, "other", 12, own=(999, 999)),
        "",
    ]
    assert foreign_cpu.own_ticks(texts, 10) == 182
    assert foreign_cpu.own_ticks(texts, 13) == 0


@needs_proc
def test_a_snapshot_of_a_recorded_proc(tmp_path):
    cpus = sorted(os.sched_getaffinity(0))
    stat = "".join(f"cpu{cpu} 100 0 50 850 0 0 0 0 0 0\n" for cpu in cpus)
    files = {"stat": stat, "10/stat": process(10, "python", 10, own=(30, 10)), "self/stat": "not a pid"}
    found = foreign_cpu.take(10, proc=tree(tmp_path, files))
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    assert found.busy_s == pytest.approx(150 * len(cpus) / ticks_per_s)
    assert found.counted_s == pytest.approx(1000 * len(cpus) / ticks_per_s)
    assert found.own_s == pytest.approx(40 / ticks_per_s)


def test_without_proc_nothing_is_observed(tmp_path):
    assert foreign_cpu.take(10, proc=tmp_path) is None


def snapshots(*, wall_s=10.0, busy_s=0.0, own_s=0.0, num_cpus=2, counted_s=20.0):
    before = Snapshot(monotonic_s=5.0, cpus=tuple(range(num_cpus)), busy_s=100.0, counted_s=500.0, own_s=50.0)
    after = Snapshot(
        monotonic_s=5.0 + wall_s,
        cpus=before.cpus,
        busy_s=100.0 + busy_s,
        counted_s=500.0 + counted_s,
        own_s=50.0 + own_s,
    )
    return before, after


@given(
    st.floats(-1e3, 1e6),
    st.floats(-1e3, 1e6),
    st.floats(0.1, 1e5),
    st.integers(1, 512),
    st.none() | st.floats(0.1, 600),
)
def test_a_fraction_is_between_0_and_1(busy_s, own_s, wall_s, num_cpus, cores):
    found = fraction(*snapshots(wall_s=wall_s, busy_s=busy_s, own_s=own_s, num_cpus=num_cpus), cores=cores)
    assert found is None or 0.0 <= found <= 1.0


@given(st.floats(0, 20), st.floats(0, 20), st.floats(0, 20))
def test_own_work_beside_others_does_not_change_their_share(foreign_s, own_s, more_s):
    alone = fraction(*snapshots(busy_s=foreign_s + own_s, own_s=own_s))
    busier = fraction(*snapshots(busy_s=foreign_s + own_s + more_s, own_s=own_s + more_s))
    assert busier == pytest.approx(alone)
    assert alone == pytest.approx(foreign_s / 20)


def test_under_a_quota_others_may_use_what_we_may_not():
    window = snapshots(busy_s=620.0, own_s=20.0, num_cpus=64)  # 60 of 64 cores are busy with others
    assert fraction(*window) == pytest.approx(60 / 64)
    assert fraction(*window, cores=2.0) == 0.0
    assert fraction(*window, cores=8.0) == pytest.approx(0.5)


def test_what_was_not_observed_is_none_and_never_0():
    before, after = snapshots(busy_s=5.0)
    assert fraction(before, after) == 0.25
    assert fraction(None, after) is None
    assert fraction(before, None) is None
    assert fraction(*snapshots(wall_s=0.05)) is None, "shorter than a few ticks"
    assert fraction(*snapshots(counted_s=0.0)) is None, "the kernel does not count"
    other = snapshots(num_cpus=1)[1]
    assert fraction(before, other) is None, "the affinity changed"


BURN = """
import os, sys, time
if len(sys.argv) > 2:
    os.sched_setaffinity(0, {int(sys.argv[2])})
print("started", flush=True)
while time.process_time() < float(sys.argv[1]):
    pass
"""


BESIDE = """
import json, os, subprocess, sys, time
from flatout.machine import cuda_devices, foreign_cpu
cpu = min(os.sched_getaffinity(0))
os.sched_setaffinity(0, {cpu})
command = [sys.executable, "-c", sys.argv[1], "60", str(cpu)]
with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as other:
    other.stdout.readline()
    before, its_before = foreign_cpu.take(), foreign_cpu.take(other.pid)
    time.sleep(1.0)
    after, its_after = foreign_cpu.take(), foreign_cpu.take(other.pid)
    other.kill()
print(json.dumps([foreign_cpu.fraction(before, after), its_after.own_s - its_before.own_s]))
"""


@needs_proc
def test_a_busy_process_of_another_session_is_seen():
    """Both are kept on one processor, so that any machine will do; more neighbours only make the share larger.

    In a session of its own, for what other tests do meanwhile in ours would be our own.
    """
    command = [sys.executable, "-c", BESIDE, BURN]
    done = subprocess.run(command, start_new_session=True, capture_output=True, text=True, check=True)
    seen, its_own_s = json.loads(done.stdout)
    assert seen > 0.2
    assert its_own_s > 0


@needs_proc
def test_own_children_are_own_while_they_live_and_after_they_ended():
    before = foreign_cpu.take()
    with subprocess.Popen([sys.executable, "-c", BURN, "0.3"], stdout=subprocess.PIPE, text=True) as child:
        child.stdout.readline()
        child.stdout.read()
        unreaped = foreign_cpu.take()
    ended = foreign_cpu.take()
    for after in (unreaped, ended):
        assert after.own_s - before.own_s >= 0.25


@needs_proc
def test_it_imports_nothing_of_flatout_and_no_framework():
    code = (
        "import sys, runpy; runpy.run_path(sys.argv[1]);"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('flatout', 'torch', 'numpy', 'psutil')))"
    )
    path = foreign_cpu.__file__
    answer = subprocess.run([sys.executable, "-S", "-c", code, path], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
