"""compile: let `torch.compile` turn the model's operations into fewer, larger kernels.

In place: the module stays what it is and checkpoint keys carry no `_orig_mod.`. Random numbers are drawn as plain
draws them (`fallback_random`), so that dropout masks and generator states agree. The backward is compiled with the
forward, in the call that is made again as plain where it raises: an error in the script's own `backward()` could not
be caught.

A model of each step that is not trained, such as a teacher, is compiled as well, unless the script does so itself;
`compile=regional` leaves its calls without gradients as they are.

`compile=dynamic` compiles for shapes that differ from step to step, `compile=regional` once for all alike blocks of a
model (the layers of a transformer; at least three in one list or sequence), which takes a fraction of the time and
leaves what is between the blocks as it is, and `compile=max-autotune` measures several kernels for each product.
`compile=reduce-overhead` records what one call starts on the GPU and starts it as one (CUDA graphs), for models whose
kernels are so short that starting them takes longer; outputs are copied out of the recordings, and gradients that the
script keeps for longer than a step. Recordings keep their memory until the process ends. It is tried where all inputs
have one shape and each model is called once a step.
Tensors that a module keeps from one step to the next by itself are PyTorch's to refuse, which the trial shows. Every
word costs a compilation of 20 to 120 s on a CPU, so few are tried: `dynamic` or `regional` come first where the facts
speak for them; another word where those before it broke; `max-autotune`, `reduce-overhead`, and the whole after its
blocks, where the former won.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ClassVar

from flatout.frameworks.lever import Lever
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.trace import Setting

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.seams.outer_call import OuterCall
    from flatout.frameworks.pytorch.session import Session

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "": {},
    "dynamic": {"dynamic": True},
    "regional": {},
    "max-autotune": {"mode": "max-autotune-no-cudagraphs"},
    "reduce-overhead": {"mode": "reduce-overhead"},
}
"""What each word, or none, says to `torch.compile`."""

MANY_BLOCKS = 12
"""From so many repeated blocks on one of them is compiled first: compiling all takes 2 to 5 s for each."""


MANY_SHAPES = 3
"""Two may be a last batch that is smaller, for which PyTorch compiles once more."""

_OURS = "flatout_call"
_LIMITS = "compile: limits reached"
_GRADIENTS = "compile: gradients out of recorded graphs"


class Compile(Lever):
    """`torch.compile` of each outermost model call of a step, or of its repeated blocks."""

    name = "compile"
    parameter = "mode"
    optional = True
    choices = ("dynamic", "regional", "max-autotune", "reduce-overhead")
    summary = "the model compiled into fewer, larger kernels"
    class_ = "rounding"
    shortens: ClassVar = ("forward", "backward")
    check = "gradients"
    needs_whole_parameters = True
    compiles = True

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """Models not compiled yet, and a compiler to do it with."""
        if not facts.models:
            return "no model call was found"
        if any(model.compiled for model in facts.main_models):
            return "the script compiles its model itself"
        if any(model.recurrent for model in facts.main_models):
            return "recurrent layers are not compiled well: PyTorch runs them as they are"
        if facts.several_threads:
            return "several threads call the model, which `torch.compile` does not support"
        return self.lacks(machine)

    def lacks(self, machine: Machine) -> str | None:
        """A C++ compiler: generated kernels are built by it."""
        return None if machine.cxx_compiler else "needs a C++ compiler (`g++` or `clang++`), none was found"

    def settings(self, facts: Facts, machine: Machine) -> tuple[Mapping[str, Setting], ...]:
        """Bare; `dynamic` before it where shapes differ; `regional` where blocks repeat, first where they are many.

        On a GPU it is first in any case: what lies between the blocks is little there, and a search tries more of it.
        """
        num_blocks = max((model.num_repeated_blocks for model in facts.main_models), default=0)
        words = [""]
        if num_blocks:
            words.insert(0 if num_blocks >= MANY_BLOCKS or facts.device == "cuda" else 1, "regional")
        if any(model.num_input_shapes >= MANY_SHAPES for model in facts.models):
            words.insert(0, "dynamic")
        same = all(model.num_input_shapes == 1 and model.calls_per_step == 1 for model in facts.models)
        words += ["reduce-overhead"] * (facts.device == "cuda" and same and not facts.distributed)
        return tuple({"mode": word} if word else {} for word in (*words, "max-autotune"))

    def worth_after(self, settings: Mapping[str, Setting], brought: Mapping[str, str]) -> bool:
        """Each word costs a compilation: where one brought nothing, others hardly do.

        `max-autotune` and `reduce-overhead` refine the bare one where that won; the bare one may win more than another
        word did; else a word has its turn where those before it broke.
        """
        mode = settings.get("mode", "")
        if mode in ("max-autotune", "reduce-overhead"):
            return brought.get("") == "best"
        return {*brought.values()} <= ({"failed", "best"} if mode == "" else {"failed"})

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """Compute each outermost call through its compiled form, made once and kept with the model."""
        from flatout.frameworks.pytorch.session import Unavailable

        mode = str(settings.get("mode", ""))
        if mode == "reduce-overhead" and session.device != "cuda":
            raise Unavailable("CUDA graphs need a model on a CUDA device")
        limits = session.kept.setdefault(_LIMITS, [])
        session.kept[self.name] = _configured(session.cache_folder, limits)
        for call in session.calls.found:
            if call.compiled_by_script and not call.trained:
                continue
            kept = f"{self.name} {mode}"
            if kept not in call.kept:
                call.kept[kept] = _regional(call, session) if mode == "regional" else _whole(call, mode, session)
            call.compute, seams = call.kept[kept]
            for seam in seams:
                seam.install()
        if mode == "reduce-overhead":  # results of one step are its own, and each step begins anew
            from torch.compiler import cudagraph_mark_step_begin

            from flatout.frameworks.pytorch.seams.recorded_graphs import OwnGradients

            gradients = session.kept[_GRADIENTS] = OwnGradients(session.parameters())

            def end_step() -> None:
                gradients.end_step()
                cudagraph_mark_step_begin()

            session.at_step_end[self.name] = end_step

    def release(self, session: Session) -> None:
        """Compute as plain again; the compiled form is kept for another time."""
        for call in session.calls.found:
            call.compute = None
            for name, (_, seams) in call.kept.items():
                for seam in seams if name.startswith(self.name) else ():
                    seam.remove()
        own_gradients = session.kept.pop(_GRADIENTS, None)
        if own_gradients is not None:
            session.at_step_end.pop(self.name, None)
            own_gradients.remove()
        configured = session.kept.pop(self.name, None)
        if configured is not None:
            configured.close()

    def evidence(self, session: Session) -> str | None:
        """Graphs that were compiled, and whether PyTorch gave up compiling more of them."""
        from torch._dynamo.utils import counters

        from flatout.frameworks.pytorch.seams.recorded_graphs import num_recorded

        num = int(counters["stats"]["unique_graphs"])
        if not num:
            return None
        limits = session.kept.get(_LIMITS)
        end = f"; PyTorch's limit of {limits[0]} was reached: other shapes and values run as plain" if limits else ""
        recorded = num_recorded() if _GRADIENTS in session.kept else None
        if recorded == 0:
            return None
        return f"{num} graph{'s' * (num != 1)} compiled" + (f", {recorded} recorded" if recorded else "") + end


def _configured(cache_folder: str | None, limits: list[str]) -> ExitStack:
    """PyTorch's compiler as the lever needs it, until closed; limits that it hits are noted, not printed."""
    import logging

    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    undo = ExitStack()
    for module, name in ((inductor, "fallback_random"), (functorch, "force_non_lazy_backward_lowering")):
        if hasattr(module, name):
            undo.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, True)
    if cache_folder is not None and CACHE_VARIABLE not in os.environ:
        os.environ[CACHE_VARIABLE] = cache_folder
        undo.callback(os.environ.pop, CACHE_VARIABLE, None)

    def is_other(record: Any) -> bool:
        words = record.args if isinstance(record.args, tuple) else ()
        if "hit config." not in str(record.msg) or not any(f"'{_OURS}" in str(word) for word in words):
            return True
        limits.append(str(words[1]))
        return False

    log = logging.getLogger("torch._dynamo.convert_frame")
    log.addFilter(is_other)
    undo.callback(log.removeFilter, is_other)
    return undo


def _whole(call: OuterCall, mode: str, session: Session) -> tuple[Callable[..., Any], list[Any]]:
    """The call of the whole module, compiled; the module is found again by the call, which does not keep it alive."""
    compiled = _compiled(mode, call.name)

    def compute(*args: Any, **kwargs: Any) -> Any:
        return compiled(call.module, *args, **kwargs)

    if mode == "reduce-overhead":
        from flatout.frameworks.pytorch.seams.recorded_graphs import with_own_results

        return with_own_results(compute, call.plain, lambda: session.kept.get(_GRADIENTS)), []
    return compute, []


def _regional(call: OuterCall, session: Session) -> tuple[Callable[..., Any], list[Any]]:
    """The plain call, and a seam in each repeated block: those of a group share what is compiled for the first."""
    from flatout.frameworks.pytorch.seams.blocks import BlockCall, repeated_blocks

    seams = []
    for number, blocks in enumerate(repeated_blocks(call.module)):
        compiled = _compiled("regional", f"{call.name}.{number}")
        seams += [BlockCall(block, compiled, session.calls) for block in blocks]
    return call.plain, seams


def _compiled(mode: str, of: str) -> Callable[..., Any]:
    """A compiled frame around a module's call: PyTorch compiles no frame of its own, which is what `nn.Sequential` has.

    Its code is its own, for PyTorch counts recompilations by code: a model that needs many would leave none to others.
    """
    import torch

    def call(module: Any, /, *args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_name=f"{_OURS} {of} {id(call)}")
    compiled: Callable[..., Any] = torch.compile(call, **OPTIONS[mode])
    return compiled
