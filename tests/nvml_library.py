"""NVIDIA's `libnvidia-ml` as numbers: what `ctypes` would find in it."""


class NvmlLibrary:
    """A driver that knows some GPUs; `refuses` names what it does not support."""

    def __init__(self, millijoules=(0,), uuids=("GPU-3a",)):
        self.millijoules, self.uuids = list(millijoules), list(uuids)
        self.refuses = ""
        self.clock_mhz, self.reasons = 1980, 0
        self.computing = {}  # by number of the GPU the processes that have memory there
        self.samples = []  # (pid, unix_us, percent)

    def __getattr__(self, name):
        if not name.startswith("nvml"):
            raise AttributeError(name)
        if name == self.refuses:
            return lambda *_: 3
        return getattr(type(self), f"_{name.removeprefix('nvml')}").__get__(self)

    @property
    def nvmlErrorString(self):
        def say(code):
            return {3: b"Not Supported", 6: b"Not Found"}[code]

        return say

    def _Init_v2(self):
        return 0

    def _DeviceGetCount_v2(self, num):
        num._obj.value = len(self.uuids)
        return 0

    def _DeviceGetHandleByIndex_v2(self, number, handle):
        handle._obj.value = number.value + 1
        return 0

    def _DeviceGetHandleByUUID(self, uuid, handle):
        handle._obj.value = self.uuids.index(uuid.decode()) + 1
        return 0

    def _DeviceGetUUID(self, handle, text, size):
        text.value = self.uuids[handle.value - 1].encode()
        return 0

    def _DeviceGetTotalEnergyConsumption(self, handle, value):
        value._obj.value = self.millijoules[handle.value - 1]
        return 0

    def _DeviceGetClockInfo(self, handle, kind, value):
        value._obj.value = self.clock_mhz
        return 0

    def _DeviceGetCurrentClocksThrottleReasons(self, handle, value):
        value._obj.value = self.reasons
        return 0

    def _DeviceGetComputeRunningProcesses_v3(self, handle, num, found):
        pids = self.computing.get(handle.value - 1, [])
        num._obj.value = len(pids)
        for place, pid in zip(found, pids, strict=False):
            place.pid = pid
        return 0

    def _DeviceGetProcessUtilization(self, handle, found, num, since):
        seen = [one for one in self.samples if one[1] >= since.value]
        num._obj.value = len(seen)
        for place, (pid, unix_us, percent) in zip(found, seen, strict=False):
            place.pid, place.unix_us, place.sm_percent = pid, unix_us, percent
        return 0 if seen else 6
