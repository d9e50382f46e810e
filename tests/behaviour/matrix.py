"""What is compared between a run under levers and the plain run, under which levers, and what may differ.

Each script writes down all that it sees while it trains, an aspect a line (`scripts/noting.py`). Its output, its exit
status and its files are aspects as well. A new lever of the registry is in the matrix without a word here.
"""

import contextlib
import io
import itertools
import json
import os
import random
import re
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

import warm
from flatout.frameworks.lever import Lever
from flatout.frameworks.pytorch.levers import registry
from flatout.records.ceilings import Machine
from flatout.records.plan import CLASSES

SCRIPTS = Path(__file__).parent / "scripts"
LEVERS = registry()
INPUT = {"rows.py": b"one\ntwo\np len(losses)\nw\nc\nthe rest\n", "pictures.py": b""}

NOT_HERE = {
    "cudnn_benchmark": "cuDNN's own, needs a GPU",
    "tf32": "the GPU's own number format",
    "pinned_memory": "the machine says so: no GPU to copy to",
    "device_prefetch": "the machine says so: no GPU to copy to",
    "device_store": "the machine says so: no GPU to keep items on",
    "expandable_segments": "memory of a GPU",
    "checkpointing": "neither script has three blocks that are alike",
    "ranks": "one rank is one process; what more of them do is compared in `tests/ranks`",
    "bf16_gradients": "it is for ranks",
    **{name: "both scripts train" for name in ("inference_mode", "onnxruntime", "openvino", "int8")},
    "no_debug": "neither script has a switch for debugging on",
    "attention": "the backend that a GPU has a choice of",
    "fused_attention": "neither script writes attention by hand",
    "read_ahead": "files of these scripts are in memory already, as it finds out",
}
"""Levers that have no effect in these scripts on a machine without a GPU, and why; engaged where that can be."""

NOT_COMPARED = {
    "batch_size": "another number of steps is what it is for",
}
"""Levers under which a script is meant to do something else."""

BITS = re.compile(r"^bits |^file .*\.pt$")
"""Aspects that only levers of class `exact` must leave as they are."""

DOCUMENTED = {
    "threads": {"torch threads": "what it sets"},
    "channels_last": {"strides": "what it sets"},
    "workers": dict.fromkeys(
        ("children", "threads", "signals", "logging", "loader"), "PyTorch starts workers, as it does for any script"
    ),
    "switch_interval": {"tracing": "what it sets"},
    "ahead": dict.fromkeys(("children", "threads", "signals", "logging"), "PyTorch starts the processes as workers"),
    "numa": {
        "affinity": "what it sets",
        "a child": "inherits it",
        "a child with a copied environment": "inherits it",
        "stderr": "PyTorch warns of more workers of the script's own than processors",
    },
    "compile": dict.fromkeys(
        (
            "environ",
            "a child",
            "a child with a copied environment",
            "path",
            "threads",
            "pickled",
            "importing",
            "tracing",
            "stderr",
        ),
        "`torch.compile` leaves it, in any script that calls it",
    ),
    "cudnn_benchmark": {"torch backends": "what it sets"},
    "tf32": {"torch precision": "what it sets"},
}
"""Aspects that a lever changes in the sight of the script, and why that is meant. On stderr more may be said, never
less: compiling has Python forget which of the script's warnings were shown once."""

TRACES = {
    "hooks": ("<function Conductor._watch_end.<locals>.excepthook at 0x>", "<built-in function excepthook>"),
    "descriptors": (re.compile(r"^/.*/\.flatout/[^/]+/orders-run$"), None),
    "model attributes": ("_compiled_call_impl", None),
    "loader": ("_flatout", None),
}
"""What a script that looks for it can see of any run under flatout, and what is there plainly instead; written down in
`docs/explanation/in-your-process.md`."""


@dataclass
class Seen:
    """What a run of a script was like: aspect to value."""

    script: str
    aspects: dict[str, object] = field(default_factory=dict)
    at_work: set[str] = field(default_factory=set)


def word(lever: Lever) -> str:
    """How the lever is typed, with the least that it takes."""
    if lever.parameter is None or lever.optional:
        return lever.name
    return f"{lever.name}={lever.choices[0] if lever.choices else max(lever.least, 1)}"


def can_be_engaged(lever: Lever, machine: Machine) -> bool:
    """Whether this machine has what it needs."""
    return lever.lacks(machine) is None


def widest(names) -> str:
    """The class of the levers together."""
    return max((LEVERS[name].class_ for name in names), key=CLASSES.index, default="exact")


def in_groups(names):
    """Few sets in which each lever is once, beside none of its rivals."""
    groups = []
    for name in names:
        fitting = (one for one in groups if not any(are_rivals(name, other) for other in one))
        group = next(fitting, None)
        if group is None:
            groups.append(group := [])
        group.append(name)
    return list(map(tuple, groups))


def are_rivals(a, b) -> bool:
    """Whether two levers do not go together."""
    return b in LEVERS[a].conflicts or a in LEVERS[b].conflicts


def together(names):
    """Few sets of levers in which each pair that goes together is together once."""
    names = list(names)
    left = {pair for pair in itertools.combinations(names, 2) if not are_rivals(*pair)}
    sets = []
    while left:
        chosen = list(min(left, key=lambda pair: (names.index(pair[0]), names.index(pair[1]))))
        while True:
            gains = {
                name: sum({*pair} - {name} <= {*chosen} and name in pair for pair in left)
                for name in names
                if name not in chosen and not any(are_rivals(name, one) for one in chosen)
            }
            best = max(gains, key=gains.__getitem__, default=None)
            if best is None or not gains[best]:
                break
            chosen.append(best)
        left -= {pair for pair in left if {*pair} <= {*chosen}}
        sets.append(tuple(sorted(chosen, key=names.index)))
    return sets


def as_a_fork(levers) -> bool:
    """Whether a fork of a process with PyTorch in it is as good as a fresh interpreter."""
    return all(LEVERS[name].toggles != "process" for name in levers)


def run(script: str, end: str, levers, folder: Path, start=warm.run) -> Seen:
    """One run of the script in a folder, which is emptied first: plain where `levers` is None."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(SCRIPTS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    _make_pictures(folder / "pictures")
    command = [sys.executable, script, end]
    if levers is not None:
        words = ",".join(word(LEVERS[name]) for name in levers)
        flags = ["--fixed", "--accept", widest(levers), "--levers", words or "none", "--json", "../told.json"]
        if words and widest(levers) == "exact" and any(_unchecked(LEVERS[name]) for name in levers):
            flags[2] = "precision"  # an exact lever that only `tune` checks is refused under `--accept exact`
        command = [sys.executable, "-m", "flatout", "run", "-q", *flags, script, end]
    before = _files(folder)
    done = start(
        command, cwd=folder, env=_environment(), input=INPUT[script], capture_output=True, timeout=180, check=False
    )
    err = _tracebacks(done.stderr, folder)
    seen = Seen(script, {"exit status": done.returncode, "stdout": _plain(done.stdout), "stderr": err})
    with contextlib.suppress(OSError):
        for line in (folder / "noted.jsonl").read_text().splitlines():
            aspect, value = json.loads(_plain(line.encode()))
            seen.aspects[aspect] = value
    for name, content in _files(folder).items():
        if name != "noted.jsonl" and before.get(name) != content:
            seen.aspects[f"file {name}"] = content
            if name.endswith(".pt"):
                seen.aspects[f"keys of {name}"] = keys(content)
    if levers is not None:
        seen.at_work = _at_work(folder)
    return seen


def differences(plain: Seen, ours: Seen, levers) -> dict[str, tuple[object, object]]:
    """Aspects that differ and should not: what plain saw, what was seen under the levers."""
    exact = widest(levers) == "exact"
    allowed = {aspect for name in levers for aspect in DOCUMENTED.get(name, ())}
    found = {}
    for aspect in plain.aspects.keys() | ours.aspects.keys():
        values = plain.aspects.get(aspect, "absent"), ours.aspects.get(aspect, "absent")
        what = aspect.partition(": ")[2] or aspect
        if (
            values[0] == values[1]
            or (what in allowed and (what != "stderr" or {*values[0]} <= {*values[1]}))
            or values[0] == without(values[1], *TRACES.get(what, (None, None)))
        ):
            continue
        if not BITS.search(aspect) or exact or "absent" in values:
            found[aspect] = values
    return found


def without(value, ours, plain):
    """The value without what flatout is known to leave in it."""
    if isinstance(value, list):
        found = [without(one, ours, plain) for one in value if plain is not None or not _is(one, ours)]
        return [plain if plain is not None and _is(one, ours) else one for one in found]
    return value


def _is(value, ours) -> bool:
    if isinstance(ours, re.Pattern):
        return isinstance(value, str) and ours.search(value) is not None
    return ours is not None and value == ours


def keys(content: bytes):
    """What plain PyTorch reads from a checkpoint, without any class of anybody: keys, types, shapes, and if finite."""
    import torch

    try:
        kept = torch.load(io.BytesIO(content), weights_only=True)
    except Exception:  # a whole model: which names it needs says the aspect `pickled`
        return ["whole", b"flatout" in content]
    return list(_leaves(kept))


def _leaves(value, path=""):
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _leaves(inner, f"{path}/{number}")
    elif hasattr(value, "dtype"):
        yield [path, str(value.dtype), list(value.shape), value.requires_grad, bool(value.isfinite().all())]
    else:
        yield [path, repr(value)]


def _environment():
    found = {name: os.environ[name] for name in ("HOME", "TMPDIR", "PYTHONPATH") if name in os.environ}
    return found | {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}


def _make_pictures(folder: Path) -> None:
    from PIL import Image

    folder.mkdir()
    for number in range(48):
        noise = random.Random(number).randbytes(3 * 160 * 120)
        Image.frombytes("RGB", (160, 120), noise).resize((320, 240)).save(folder / f"{number:02}.png")


def _unchecked(lever: Lever) -> bool:
    return lever.check == "batches" and not lever.checks_itself


def _files(folder: Path) -> dict[str, bytes]:
    ours = {".flatout", "__pycache__"}
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not ours & {*path.parts}
    }


def _plain(text: bytes) -> str:
    return re.sub("0x[0-9a-f]{6,}", "0x", text.decode())


FRAME = re.compile(r'^ *(?:\| )*File "([^"]+)", line \d+, in ')


def _tracebacks(text: bytes, folder: Path) -> list[str]:
    """Lines; of tracebacks the script's own frames only, since under levers PyTorch may be called otherwise."""
    found, skipping = [], False
    for line in _plain(text).splitlines():
        frame = FRAME.match(line)
        if frame:
            skipping = not frame[1].startswith(str(folder))
        elif not line.startswith("    "):
            skipping = False
        if not skipping:
            found.append(line)
    return found


def _at_work(folder: Path) -> set[str]:
    """Levers that have shown an effect, from the trace."""
    found = set()
    for path in folder.glob(".flatout/*/trace-run.jsonl"):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if record.get("kind") == "toggle":
                found |= {*record.get("evidence", {})}
    return found
