"""What did the script turn out to do, as levers need to know it?

In: the session's models, optimizers and loaders. Out: `Facts`, plain values that the parent can read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from flatout.frameworks.lever import Lever
from flatout.frameworks.pytorch.observe import devices
from flatout.frameworks.pytorch.observe.attention import BY_HAND, allowed
from flatout.frameworks.pytorch.observe.memory import memory_of_device
from flatout.frameworks.pytorch.seams.blocks import BlockCall, repeated_blocks
from flatout.frameworks.pytorch.seams.debug_switches import set_from_outside, switched_on
from flatout.frameworks.pytorch.seams.optimizers import can_fuse
from flatout.frameworks.pytorch.seams.outer_call import OuterCall, is_compiled
from flatout.frameworks.pytorch.session import Session
from flatout.records.facts import EndedBy, Facts, LoaderFacts, ModelFacts, OptimizerFacts

CONVOLUTIONS = {
    nn.Conv1d: 1, nn.ConvTranspose1d: 1, nn.Conv2d: 2, nn.ConvTranspose2d: 2, nn.Conv3d: 3, nn.ConvTranspose3d: 3,
}  # fmt: skip

TAKE_FAULTS_AWAY = {"heap", "huge_pages"}
"""Levers under which a step has fewer page faults than the plain one, so that nothing is counted."""


def find(session: Session, ended_by: EndedBy = "optimizer") -> Facts:
    """The facts as they stand now."""
    where = devices.of(session.parameters())
    seen = {word for call in session.calls.found for word in call.attention or ()}
    loaders = tuple(_loader(loader, session) for loader in session.loaders.training)
    if session.loaders.studies:  # a trial or a run that learns, in which the sources of datasets were read
        from flatout.frameworks.pytorch.input.items.syntax import forget

        forget()
    return Facts(
        device="cpu" if where is None else where.type,
        models=tuple(_model(call) for call in session.calls.found),
        optimizers=tuple(_optimizer(o) for o in session.optimizers),
        loaders=loaders,
        num_threads=torch.get_num_threads(),
        autocast=any(call.autocast_seen for call in session.calls.found),
        grad_scaler=session.scaler_seen,
        distributed=torch.distributed.is_available() and torch.distributed.is_initialized(),
        matmul_precision=_matmul_precision(),
        gpus=_gpus(session),
        convolution_tf32=where is not None and where.type == "cuda" and _convolves_in_tf32(),
        cudnn_benchmark=torch.backends.cudnn.benchmark,
        attention=None if session.calls.look_at_graph is None else tuple(sorted(seen - {BY_HAND})),
        softmax=BY_HAND in seen,
        attention_chosen=not all(allowed().values()),
        step_rhythm=ended_by,
        page_faults_per_step=None if session.engaged.keys() & TAKE_FAULTS_AWAY else session.page_faults.per_step,
        num_ranks=session.ranks.group.world if session.ranks is not None else 1,
        rank_mode=session.ranks.mode if session.ranks is not None else "",
        device_memory=memory_of_device(),
        debug_switches=switched_on(session.device, traced=session.traced),
        set_from_outside=set_from_outside(session.device),
        several_threads=session.calls.infers and not session.calls.thread,
        busy_threads=session.other_threads.busy() if session.other_threads is not None else (),
    )


def _model(call: OuterCall) -> ModelFacts:
    parameters = list(call.module.parameters())
    modules = list(call.module.modules())
    return ModelFacts(
        name=call.name,
        trained=call.trained,
        num_parameters=sum(p.numel() for p in parameters),
        num_modules=len(modules),
        dtypes=tuple(sorted({str(p.dtype).removeprefix("torch.") for p in parameters})),
        convolution_dims=tuple(
            sorted({dims for kind, dims in CONVOLUTIONS.items() if any(isinstance(m, kind) for m in modules)})
        ),
        recurrent=any(isinstance(m, nn.RNNBase | nn.RNNCellBase) for m in modules),
        compiled=call.compiled_by_script or any(_compiled_by_script(m) for m in modules),
        calls_per_step=call.calls_per_step,
        num_repeated_blocks=sum(map(len, repeated_blocks(call.module))),
        num_input_shapes=max(len(call.shapes), 1),
        batch_sizes=tuple(sorted({shapes[0][0] for shapes in call.shapes if shapes and shapes[0]})),
    )


def _compiled_by_script(module: nn.Module) -> bool:
    present = vars(module).get("_compiled_call_impl")
    return is_compiled(module) or not isinstance(present, OuterCall | BlockCall | None)


def _optimizer(optimizer: torch.optim.Optimizer) -> OptimizerFacts:
    return OptimizerFacts(
        name=type(optimizer).__name__,
        fused=any(bool(group.get("fused")) for group in optimizer.param_groups),
        foreach=any(bool(group.get("foreach")) for group in optimizer.param_groups),
        can_fuse=can_fuse(optimizer),
    )


def _loader(loader: DataLoader[Any], session: Session) -> LoaderFacts:
    iterable = isinstance(loader.dataset, IterableDataset)
    try:
        num_batches = None if iterable else len(loader)
    except Exception:  # noqa: BLE001  a sampler of the script's own may raise anything
        num_batches = None
    return LoaderFacts(
        dataset=type(loader.dataset).__name__,
        batch_size=loader.batch_size,
        num_batches=num_batches,
        num_workers=int(loader.num_workers),  # PyTorch takes True for one of them, and 1 for True below
        prefetch_factor=loader.prefetch_factor,
        pinned=bool(loader.pin_memory),
        iterable=iterable,
        changeable=session.loaders.may_change(loader),
        batch_bytes=session.loaders.batch_bytes(loader),
        why_not={
            name: lever.why_not(session, loader)
            for name, lever in session.levers.items()
            if type(lever).why_not is not Lever.why_not
        },
    )


def _matmul_precision() -> str:
    """In the newer terms where PyTorch has them: asked in the older ones, 2.9 and 2.10 warn on the script's stderr."""
    newer = getattr(torch.backends.cuda.matmul, "fp32_precision", None)  # not before PyTorch 2.9
    if newer is None:
        return torch.get_float32_matmul_precision()
    return "high" if newer == "tf32" else "highest"


def _gpus(session: Session) -> tuple[str, ...]:
    """As the driver names them; those of other ranks are not known here."""
    if (torch.distributed.is_available() and torch.distributed.is_initialized()) or session.ranks is not None:
        return ()
    found = {p.device.index for p in session.parameters() if p.device.type == "cuda"}
    uuids = [getattr(torch.cuda.get_device_properties(index), "uuid", None) for index in sorted(found)]
    return () if None in uuids else tuple(f"GPU-{uuid}" for uuid in uuids)


def _convolves_in_tf32() -> bool:
    """What cuDNN may do, on a GPU that can: cuDNN is allowed to unless somebody has forbidden it."""
    if torch.version.cuda is None or torch.cuda.get_device_capability() < (8, 0):
        return False
    newer = getattr(getattr(torch.backends.cudnn, "conv", None), "fp32_precision", None)
    return bool(torch.backends.cudnn.allow_tf32) if newer is None else newer == "tf32"
