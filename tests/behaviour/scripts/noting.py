"""Writes down what a script sees, an aspect a line, into `noted.jsonl`: `["while: environ", [...]]`.

Aspects that begin with `bits` say what was computed: they are those of plain under exact levers only.
"""

import copy
import gc
import hashlib
import inspect
import io
import json
import locale
import logging
import multiprocessing
import os
import pickle
import pickletools
import random
import resource
import signal
import subprocess
import sys
import threading
import warnings

SHOW = """
import json, os, sys
known = [(name, value) for name, value in os.environ.items() if name not in ("LINES", "COLUMNS")]
print(json.dumps([known, sys.path, sys.argv]))
"""
"""What a child sees. Two variables are set by readline behind Python's back: a child that leaves `site` out (`-S`) gets
them plainly, and not under flatout."""


def note(aspect, value):
    """One line; what holds addresses is written without them."""
    with open("noted.jsonl", "a") as file:
        print(json.dumps([aspect, value], default=repr), file=file)


def digest(value):
    return hashlib.sha256(value).hexdigest()[:16]


def surroundings(when):
    """What the process is like, and what a child of it is like."""
    noted = {
        "name": [__name__, sys.modules["__main__"].__name__, sys.modules["__main__"].__file__],
        "argv": [sys.argv, sys.orig_argv[1:], sys.executable],
        "path": sys.path,
        "cwd": os.getcwd(),
        "environ": list(os.environ.items()),
        "flags": [repr(sys.flags), sys.warnoptions, sys._xoptions],
        "hooks": [repr(h) for h in (sys.excepthook, threading.excepthook, sys.unraisablehook, sys.displayhook)],
        "tracing": [sys.gettrace(), sys.getprofile(), sys.getrecursionlimit(), sys.getswitchinterval()],
        "importing": [[repr(type(f)) for f in sys.meta_path], len(sys.path_hooks), "sitecustomize" in sys.modules],
        "threads": sorted(t.name for t in threading.enumerate() if t.name != "QueueFeederThread"),
        "children": sorted(p.name for p in multiprocessing.active_children()),
        "signals": [str(signal.getsignal(n)) for n in sorted(signal.valid_signals())],
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "timers": [signal.getitimer(k) for k in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)],
        "warnings": [repr(f) for f in warnings.filters],
        "logging": [repr(logging.root.handlers), logging.root.level, loggers()],
        "collector": [gc.isenabled(), gc.get_threshold(), len(gc.callbacks), gc.get_freeze_count(), gc.get_debug()],
        "limits": [resource.getrlimit(k) for k in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE, resource.RLIMIT_AS)],
        "affinity": [sorted(os.sched_getaffinity(0)), os.nice(0), umask()],
        "group": [os.getpgrp() == os.getpgid(os.getppid()), os.getsid(0) == os.getsid(os.getppid())],
        "descriptors": descriptors(),
        "streams": [(s.name, s.encoding, s.errors, s.line_buffering) for s in (sys.stdin, sys.stdout, sys.stderr)],
        "locale": locale.setlocale(locale.LC_ALL),
        "subprocess": [str(inspect.signature(f)) for f in (subprocess.run, subprocess.Popen, os.fork, open)],
        "a child": json.loads(subprocess.check_output([sys.executable, "-S", "-c", SHOW, "x"])),
        "a child with a copied environment": json.loads(
            subprocess.check_output([sys.executable, "-S", "-c", SHOW, "y"], env=dict(os.environ))
        ),
    }
    for aspect, value in noted.items():
        note(f"{when}: {aspect}", value)


def loggers():
    """Those that somebody has set up; a module that is imported makes one as well, which says nothing."""
    made = {name: one for name, one in logging.root.manager.loggerDict.items() if isinstance(one, logging.Logger)}
    own = {name: one for name, one in made.items() if name.partition(".")[0] not in ("torch", "PIL")}
    return sorted((name, one.level, repr(one.handlers)) for name, one in own.items() if one.level or one.disabled)


def umask():
    present = os.umask(0)
    os.umask(present)
    return present


def descriptors():
    """Files that are open; pipes and shared memory come and go with loaders."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # what the walk itself opened
            continue
    return sorted(path for path in found if path[:1] == "/" and not path.startswith(("/proc/", "/dev/shm/torch_")))


def framework(when):
    """PyTorch's own settings."""
    import torch

    noted = {
        "torch threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "torch modes": [
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled(),
            torch.is_autocast_enabled("cpu"), torch.are_deterministic_algorithms_enabled(),
            str(torch.get_default_device()),
        ],
        "torch precision": [str(torch.get_default_dtype()), torch.get_float32_matmul_precision()],
        "torch denormals": (torch.tensor([1e-39]) * 1.0).item() != 0,
        "torch backends": [torch.backends.mkldnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.enabled],
        "torch module": [type(torch.__loader__).__name__, type(torch.__spec__).__name__, torch.__spec__.origin],
    }  # fmt: skip
    for aspect, value in noted.items():
        note(f"{when}: {aspect}", value)


def objects(when, model, optimizer, loader):
    """What the script's own objects look like to the script."""
    state = model.state_dict()
    kept = optimizer.state_dict()
    hooks = [(m._forward_hooks, m._forward_pre_hooks, m._backward_hooks) for m in model.modules()]
    noted = {
        "model": [repr(model), repr(type(model).__mro__), model.training],
        "model attributes": [sorted(vars(m)) for m in model.modules()],
        "model hooks": [list(map(len, those)) for those in hooks],
        "source": inspect.getsource(type(model)),
        "state dict": [(k, str(v.dtype), list(v.shape), v.device.type, v.requires_grad) for k, v in state.items()],
        "strides": [(k, v.stride()) for k, v in state.items()],
        "gradients": [p.grad is not None and str(p.grad.dtype) for p in model.parameters()],
        "optimizer": [repr(optimizer), sorted(vars(optimizer)), len(optimizer._optimizer_step_post_hooks)],
        "optimizer state": [sorted(s) for s in kept["state"].values()],
        "optimizer groups": [sorted(g.items()) for g in kept["param_groups"]],
        "loader": [loader.num_workers, loader.batch_size, loader.pin_memory, loader.prefetch_factor,
                   loader.persistent_workers, repr(loader.multiprocessing_context), sorted(vars(loader))],
        "pickled": [names_in(pickle.dumps(one)) for one in (model, optimizer, loader.dataset, copy.deepcopy(model))],
    }  # fmt: skip
    for aspect, value in noted.items():
        note(f"{when}: {aspect}", value)


def names_in(kept):
    """The classes and functions that a pickle names: what must be importable to read it."""
    found, words = set(), []
    for operation, argument, _ in pickletools.genops(kept):
        if operation.name in ("SHORT_BINUNICODE", "BINUNICODE"):
            words.append(argument)
        elif operation.name == "STACK_GLOBAL":
            found.add(".".join(words[-2:]))
        elif operation.name == "GLOBAL":
            found.add(argument)
    return [sorted(found), b"flatout" in kept]


def bits(when, model, optimizer, losses):
    """What was computed up to here, and where the random streams stand."""
    import numpy
    import torch

    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    noted = {
        "weights": digest(b"".join(v.detach().contiguous().numpy().tobytes() for v in model.state_dict().values())),
        "optimizer": digest(file.getvalue()),
        "losses": [loss.hex() for loss in losses],
        "torch random": digest(torch.get_rng_state().numpy().tobytes()),
        "numpy random": digest(pickle.dumps(numpy.random.get_state())),
        "python random": digest(repr(random.getstate()).encode()),
    }
    for aspect, value in noted.items():
        note(f"bits {when}: {aspect}", value)
    note(f"{when}: finite", all(loss == loss and abs(loss) < 1e6 for loss in losses))
