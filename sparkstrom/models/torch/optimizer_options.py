"""Options of a TorchModel: which of them go together, and where a task's GPU is."""

from __future__ import annotations

import os
from typing import Any

import torch

from sparkstrom.base.errors import UsageError
from sparkstrom.models.torch.torch_losses import check_loss

VISIBLE = "CUDA_VISIBLE_DEVICES"  # of all GPUs those that this process sees, in this order


def check_options(
    loss: Any, step: Any, clip_norm: float | None, accumulate: int, autocast: str | None
) -> None:
    """Raise UsageError naming the option that cannot be, and what can."""
    if loss is not None or step is None:
        check_loss(loss)
    if step is not None:
        _refuse_beside_step(step, clip_norm, accumulate, autocast)
    if not (isinstance(accumulate, int) and accumulate >= 1):
        raise UsageError(f"accumulate={accumulate!r}: must be a whole number from 1")
    if clip_norm is not None and not 0 < clip_norm < float("inf"):
        raise UsageError(f"clip_norm={clip_norm!r}: must be above 0, or None")
    if autocast not in (None, "bfloat16"):
        raise UsageError(
            f"autocast={autocast!r}: must be 'bfloat16' or None; float16 needs a scaled loss, and"
            " float32 is what None computes in"
        )


def _refuse_beside_step(
    step: Any, clip_norm: float | None, accumulate: int, autocast: str | None
) -> None:
    options = {
        "clip_norm": clip_norm,
        "accumulate": None if accumulate == 1 else accumulate,
        "autocast": autocast,
    }
    given = [name for name, value in options.items() if value is not None]
    if given or not callable(step):
        raise UsageError(
            f"step={step!r} with {', '.join(given) or 'nothing else'}: a step of your own is a"
            " function (module, optimizer, batch) -> loss, and does the rest itself; pass none of"
            " clip_norm, accumulate, autocast"
        )


def device_name(name: str | None) -> str | None:
    """The name itself. Raise UsageError for a device that is none of torch's CPU and CUDA."""
    if name in (None, "cpu", "cuda"):
        return name
    kind, _, number = str(name).partition(":")
    if kind == "cuda" and number.isdigit():
        return name
    raise UsageError(
        f"device={name!r}: must be 'cpu', 'cuda', 'cuda:NUMBER', or None for the GPU that Spark"
        " assigned to the task, if any"
    )


def device_of(name: str | None, gpu: int | None) -> torch.device:
    """The device of this task: what was asked for, else Spark's GPU, else the CPU.

    ``device="cuda"`` is Spark's GPU, too, where it assigned one. Raise UsageError where there is
    none of that number.
    """
    if gpu is not None and name in (None, "cuda"):
        name = f"cuda:{_visible(gpu)}"
    if name is None or name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError(
            f"device={name!r}, but torch {torch.__version__} sees no GPU on this executor:"
            " install a CUDA build there, or pass device='cpu'"
        )
    device = torch.device(name)
    if (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"device={name!r}, but torch sees {torch.cuda.device_count()} GPUs on this executor"
            f" ({VISIBLE}={os.environ.get(VISIBLE)!r}): pass device='cuda:NUMBER' below that, or"
            " let Spark assign them (spark.task.resource.gpu.amount)"
        )
    return device


def index_of(device: torch.device) -> int | None:
    """Which of the GPUs that this process sees; None for the CPU."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.current_device()) if device.index is None else device.index


def _visible(gpu: int) -> int:
    """Spark counts the machine's GPUs, torch those that this process sees."""
    seen = os.environ.get(VISIBLE, "").split(",")
    return seen.index(str(gpu)) if str(gpu) in seen else gpu
