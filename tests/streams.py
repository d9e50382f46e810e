"""A device whose streams run when a test says, with the ways in which real ones go wrong.

Operations are only noted when they are ordered; they read and write memory when their stream runs. Nobody runs a stream
further than the host waits for, unless a test does: what is not waited for has not happened. Freed memory is given
again at once, as PyTorch's caching allocator does, but for streams that are known to use it.
"""

import contextlib
import weakref

import torch


class Stream:
    def __init__(self, name):
        self.name = name
        self.waiting = []
        self.num_ordered = self.num_done = 0

    def order(self, act, after=None):
        self.waiting.append((act, after))
        self.num_ordered += 1

    @property
    def can_run(self):
        return bool(self.waiting) and (self.waiting[0][1] is None or self.waiting[0][1].query())

    def run(self, num=1):
        for _ in range(num):
            if not self.can_run:
                return
            act, _ = self.waiting.pop(0)
            act()
            self.num_done += 1


class Event:
    def __init__(self, stream):
        self.stream, self.place = stream, stream.num_ordered

    def query(self):
        return self.stream.num_done >= self.place

    def synchronize(self):
        while not self.query():
            after = self.stream.waiting[0][1]
            if after is not None:
                after.synchronize()
            self.stream.run()


class Block:
    """Memory of the device, which belongs to the pool of a stream."""

    def __init__(self, num_bytes, stream):
        self.storage = torch.UntypedStorage(num_bytes)
        self.stream = stream
        self.users = set()
        self.until = []
        """Events after which it is free; None while somebody has it."""

    @property
    def free(self):
        return self.until is not None and all(event.query() for event in self.until)

    def tensor(self, size, stride, dtype):
        return torch.empty(0, dtype=dtype).set_(self.storage, 0, size, stride)


class FakeDevice:
    """Fulfils `flatout.frameworks.pytorch.input.transfer.device.Device`; its memory is the host's.

    `forgets` names calls that have no effect, so that a test can see that it would be noticed.
    """

    def __init__(self, total_bytes=2**26, forgets=()):
        self.streams = {name: Stream(name) for name in ("computing", "beside")}
        self.current = self.streams["computing"]
        self.log = []
        self.forgets = forgets
        self.graph = False
        self.out_of_memory = False
        self.total = self.free = total_bytes
        self.retries = 0
        self.blocks = []
        self.owners = {}  # by the tensor's `id`
        self.locked = []
        self.results = []

    # -- what the device offers --

    def capturing(self):
        return self.graph

    def pinned(self, like):
        self.log.append(("pin", like.nbytes))
        return self.pin(torch.empty_strided(like.size(), like.stride(), dtype=like.dtype).copy_(like))

    def pin(self, tensor):
        self.locked.append(tensor)
        return tensor

    def is_pinned(self, tensor):
        return any(one.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for one in self.locked)

    def num_retries(self):
        return self.retries

    def free_bytes(self):
        return self.free

    def total_bytes(self):
        return self.total

    @contextlib.contextmanager
    def beside(self):
        former, self.current = self.current, self.streams["beside"]
        try:
            yield
        finally:
            self.current = former

    def empty(self, size, stride, dtype):
        if self.out_of_memory:
            raise torch.OutOfMemoryError("none is left")
        meta = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        num_bytes = meta.untyped_storage().nbytes()
        fitting = [one for one in self.blocks if one.stream is self.current and one.storage.nbytes() == num_bytes]
        block = next((one for one in fitting if one.free), None)
        if block is None:
            block = Block(num_bytes, self.current)
            self.blocks.append(block)
        block.until, block.users = None, set()
        tensor = block.tensor(size, stride, dtype)
        self.owners[id(tensor)] = block
        weakref.finalize(tensor, self._freed, id(tensor), block)
        return tensor

    def _freed(self, key, block):
        del self.owners[key]
        block.until = [Event(stream) for stream in block.users]

    def alias(self, tensor):
        block = self.owners.get(id(tensor))
        return tensor if block is None else block.tensor(tensor.size(), tensor.stride(), tensor.dtype)

    def copy(self, target, source):
        assert self.is_pinned(source), "what is not page-locked is copied while the host waits"
        self.log.append(("copy", self.current.name))
        target = self.alias(target)
        self.current.order(lambda: target.copy_(source))

    def gather(self, target, rows, places):
        self.log.append(("gather", self.current.name))
        target, rows, places = self.alias(target), self.alias(rows), self.alias(places)
        self.current.order(lambda: torch.index_select(rows, 0, places, out=target))

    def scatter(self, rows, places, source):
        self.log.append(("scatter", self.current.name))
        rows, places, source = self.alias(rows), self.alias(places), self.alias(source)
        self.current.order(lambda: rows.index_copy_(0, places, source))

    def record(self):
        return Event(self.current)

    def wait(self, event):
        self.log.append(("wait", self.current.name))
        if "wait" not in self.forgets:
            self.current.order(lambda: None, after=event)

    def in_use(self, tensor):
        self.log.append(("in use", self.current.name))
        if "in_use" not in self.forgets:
            self.owners[id(tensor)].users.add(self.current)

    # -- what a test does --

    def compute(self, tensor, change=None):
        """Have the current stream read a tensor, and perhaps change it after that."""
        tensor = self.alias(tensor)

        def kernel():
            self.results.append(tensor.clone())
            if change is not None:
                change(tensor)

        self.current.order(kernel)

    def synchronize(self):
        for stream in self.streams.values():
            Event(stream).synchronize()

    def plain(self, tensor):
        """The script's own copy, for which the host waits."""
        self.synchronize()
        return tensor.detach().clone(memory_format=torch.preserve_format)


class FakeDevices:
    """`devices` of a `Transfer`."""

    def __init__(self, *devices):
        self.devices = devices

    def __call__(self, named):
        return self.devices[named.index or 0] if named.type == "cuda" else None
