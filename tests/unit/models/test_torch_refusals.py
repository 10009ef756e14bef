"""Tests that TorchModel refuses what it cannot train, before the job, with reason and remedy."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.models.base import Batch
from sparkstrom.spark.executor.entry_points import pickle_by_value
from sparkstrom.worker.training_job import require_picklable

torch = pytest.importorskip(
    "torch", reason="torch is not here: the tests pin it for CPython 3.11, whose build is CPU only"
)
from torch import nn, optim  # noqa: E402
from torch.nn import functional  # noqa: E402

from sparkstrom.models.torch import TorchModel  # noqa: E402

SGD = partial(optim.SGD, lr=0.1)
mse = functional.mse_loss


def frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(False)


def shared() -> nn.Module:
    """Return a module with two parameters in the same memory."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = nn.Parameter(module[0].weight.data)
    return module


def make_module_with(**values: Any) -> nn.Module:
    """Return a module with these parameters or, for other tensors, buffers."""
    module = nn.Linear(2, 2)
    for name, value in values.items():
        if isinstance(value, nn.Parameter):
            module.register_parameter(name, value)
        else:
            module.register_buffer(name, value)
    return module


def make_integer_parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)


def lazy_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d(affine=False))


class Locked(nn.Linear):
    """A module with a lock, which cannot be pickled."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.busy = threading.Lock()


class Cached(nn.Linear):
    """A module that keeps an output with its graph, which torch does not copy."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.last = self(torch.ones(1, 2))


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (lambda: "net", "module is a str: pass a torch.nn.Module"),
        (lambda: nn.LazyLinear(2), "weight is lazy.*run the module once"),
        (lazy_norm, "buffer 1.running_mean is lazy"),
        (
            lambda: make_module_with(w=nn.Parameter(torch.ones(2) * 1j)),
            "w is complex64.*view_as_real",
        ),
        (lambda: make_module_with(w=make_integer_parameter()), "w is int64.*register_buffer"),
        (
            lambda: make_module_with(b=torch.eye(2).to_sparse()),
            "layout torch.sparse_coo.*persistent=False",
        ),
        (lambda: make_module_with(b=torch.ones(1).expand(2)), r"buffer b is expanded.*clone\(\)"),
        (lambda: nn.Linear(2, 2).double(), r"weight is float64.*module\.float\(\)"),
        (lambda: nn.Linear(2, 2).bfloat16(), "weight is bfloat16.*autocast='bfloat16'"),
        (lambda: nn.Linear(2, 2, device="meta"), "weight is on the meta device"),
        (frozen, "no parameter with requires_grad"),
        (nn.ReLU, "no parameter with requires_grad"),
        (lambda: nn.DataParallel(nn.Linear(2, 2)), r"wrapped in DataParallel.*wrapped\.module"),
        (shared, "0.weight and 1.weight share memory but are two objects"),
        (Locked, "Locked cannot be copied.*lock"),
        (Cached, "Cached cannot be copied"),
    ],
)
def test_unsuitable_module_is_refused(module: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        TorchModel(module(), mse, SGD)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"loss": "mse"}, "loss is 'mse': pass a function"),
        ({"loss": None}, "loss is None"),
        ({"loss": nn.MSELoss(reduction="sum")}, "reduction='sum': it must be the mean"),
        ({"loss": partial(mse, reduction="none")}, "reduction='none'"),
        ({"loss": nn.Bilinear(1, 1, 1)}, "loss Bilinear has its own parameters"),
        (
            {"optimizer": optim.SGD([torch.ones(1)], lr=1)},
            r"own: pass functools.partial\(torch.optim.SGD, lr=1\) \(import functools\)",
        ),
        ({"optimizer": lambda params: 7}, "returned a int"),
        ({"optimizer": partial(optim.SGD, lr=-1)}, "rejects these parameters: .*-1"),
        ({"optimizer": lambda params: optim.SGD(params[:1])}, "leaves out bias"),
        ({"optimizer": lambda p: optim.SGD([nn.Parameter(torch.ones(1))])}, "are not the module's"),
        ({"scheduler": 5}, "scheduler is a int: pass a function"),
        ({"scheduler": lambda made: made}, "returned a SGD"),
        ({"clip_norm": 0.0}, "clip_norm=0.0: must be a finite number above 0, or None"),
        ({"accumulate": 0}, "accumulate=0: must be a whole number"),
        ({"autocast": "float16"}, "autocast='float16': must be 'bfloat16'"),
        ({"outputs": "odds"}, "outputs='odds': must be one of probabilities, logits"),
        ({"step": print, "clip_norm": 1.0, "accumulate": 2}, "with clip_norm, accumulate"),
        ({"step": 3}, "step=3"),
        ({"device": "gpu"}, "device='gpu': must be 'cpu', 'cuda'"),
    ],
)
def test_invalid_option_is_refused(options: dict[str, Any], why: str) -> None:
    arguments = {"loss": mse, "optimizer": SGD} | options
    with pytest.raises(UsageError, match=why):
        TorchModel(nn.Linear(2, 2), **arguments)


ROWS = np.ones((3, 2), np.float32)


@pytest.mark.parametrize(
    ("features", "labels", "why"),
    [
        (ROWS, np.array([[1.0, np.nan]] * 3), r"row 0: label at \[1\] is nan"),
        (np.array([[0, 0], [0, np.inf], [0, 0]]), ROWS, r"row 1: features at \[1\] is inf"),
        (ROWS, ROWS[:2], "3 rows of features, but 2 of labels"),
        (ROWS, np.array(["a", "b", "c"]), "labels are <U1, not numbers"),
        ((ROWS, ROWS), ROWS, "forward does not take these features: too many"),
        ({"picture": ROWS}, ROWS, "forward does not take these features.*'input'"),
        ({"input": ROWS * np.nan}, ROWS, r"row 0: features\[input\] at \[0\] is nan"),
    ],
)
def test_unsuitable_rows_are_refused(features: Any, labels: Any, why: str) -> None:
    model = TorchModel(nn.Linear(2, 2), mse, SGD)
    model.check(ROWS, ROWS)
    model.check({"input": ROWS}, ROWS)
    with pytest.raises(UsageError, match=why):
        model.check(features, labels)


class MemoryReplacingModule(nn.Linear):
    """A module that replaces its weight's memory."""

    def forward(self, x: Any) -> Any:
        self.weight.data = self.weight.data.clone()
        return super().forward(x)


def test_module_that_replaces_parameter_memory_is_refused() -> None:
    """A module that replaces a parameter's memory is refused at the step."""
    model = TorchModel(MemoryReplacingModule(2, 2), mse, SGD)
    model.bind(model.initial())
    with pytest.raises(UsageError, match=r"parameter weight left the flat vector.*in place"):
        model.step(Batch(ROWS, ROWS))


class MemoryReplacingOptimizer(optim.SGD):
    """An optimizer that does not step in place."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.data - 0.1 * parameter.grad


def test_optimizer_that_replaces_parameter_memory_is_refused() -> None:
    """An optimizer that replaces a parameter's memory is refused at the step."""
    model = TorchModel(nn.Linear(2, 2), mse, MemoryReplacingOptimizer)
    model.bind(model.initial())
    with pytest.raises(UsageError, match="left the flat vector"):
        model.step(Batch(ROWS, ROWS))


class NeedsClosure(optim.SGD):
    """A user's optimizer that needs a closure, like LBFGS."""

    def step(self, closure: Any) -> None:
        """Evaluate several times."""


def test_custom_optimizer_that_needs_closure_is_refused() -> None:
    with pytest.raises(UsageError, match="NeedsClosure cannot be used: its step needs a closure"):
        TorchModel(nn.Linear(2, 2), mse, NeedsClosure)


@pytest.mark.parametrize("value", [None, torch.ones(2)])
def test_custom_step_that_returns_no_loss_is_refused(value: Any) -> None:
    model = TorchModel(nn.Linear(2, 2), None, SGD, step=lambda *given: value)
    model.bind(model.initial())
    with pytest.raises(UsageError, match="it must return the loss"):
        model.step(Batch(ROWS, ROWS))


def test_loss_that_is_no_number_is_refused() -> None:
    model = TorchModel(nn.Linear(2, 2), lambda output, target: (output - target) ** 2, SGD)
    model.bind(model.initial())
    with pytest.raises(UsageError, match=r"returned \[3, 2\]: it must be one number"):
        model.step(Batch(ROWS, ROWS))


@pytest.mark.parametrize("params", [np.zeros(5, np.float32), np.zeros(6)])
def test_bind_refuses_array_of_wrong_size_or_dtype(params: Any) -> None:
    with pytest.raises(UsageError, match=r"need float32\[6\]"):
        TorchModel(nn.Linear(2, 2), mse, SGD).bind(params)


def test_unpicklable_part_of_model_is_named() -> None:
    pytest.importorskip("pyspark", reason="the pickler is Spark's")
    lock = threading.Lock()
    model = TorchModel(nn.Linear(2, 2), lambda o, t: mse(o, t) if lock else None, SGD)
    with pytest.raises(UsageError, match=r"TorchModel\._loss cannot be pickled.*lock"):
        require_picklable(model, pickle_by_value)
    require_picklable(TorchModel(nn.Linear(2, 2), lambda o, t: mse(o, t), SGD), pickle_by_value)
