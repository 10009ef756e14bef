"""Tests of buffers: to bytes and back, and their average over workers."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from sparkstrom.base.errors import UsageError

torch = pytest.importorskip(
    "torch", reason="torch is not here: the tests pin it for CPython 3.11, whose build is CPU only"
)
from torch import nn  # noqa: E402

from sparkstrom.models.torch import TorchModel  # noqa: E402


def make(**buffers: object) -> TorchModel:
    """Return a model with these buffers."""
    module = nn.Linear(1, 1)
    for name, value in buffers.items():
        module.register_buffer(name, torch.as_tensor(value), persistent=name != "passing")
    return TorchModel(module, nn.MSELoss(), partial(torch.optim.SGD, lr=0.1))


def test_buffers_are_encoded_in_order_of_module() -> None:
    model = make(mean=[1.5, -2.0], count=7, passing=[9.0])
    data = model.buffers_bytes()
    assert data == np.array([1.5, -2], "<f4").tobytes() + np.array(7, "<i8").tobytes()
    other = make(mean=[0.0, 0.0], count=0, passing=[0.0])
    memory = other.module.mean
    other.load_buffers_bytes(data)
    assert other.module.mean is memory
    assert memory.tolist() == [1.5, -2.0]
    assert other.module.count == 7
    assert other.module.passing == 0  # state_dict leaves it out, and so does the mesh


class BufferHidingModule(nn.Module):
    """A module whose state_dict leaves out its layers' buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        state = super().state_dict(*args, **options)
        return {name: value for name, value in state.items() if "running" not in name}


def test_buffers_missing_from_state_dict_are_included() -> None:
    model = TorchModel(BufferHidingModule(), nn.MSELoss(), partial(torch.optim.SGD, lr=0.1))
    assert len(model.buffers_bytes()) == 4 + 4 + 4 + 4 + 8


def test_float_buffers_are_averaged_and_integers_take_maximum() -> None:
    models = [
        make(x=[a, 0.0], n=n, seen=s)
        for a, n, s in ((1.0, 3, False), (2.0, 9, True), (6.0, 4, False))
    ]
    made = models[0].average_buffers([model.buffers_bytes() for model in models])
    models[0].load_buffers_bytes(made)
    module = models[0].module
    assert (module.x.tolist(), module.n.item(), module.seen.item()) == ([3.0, 0.0], 9, True)


def test_buffer_means_are_computed_in_float64_in_order() -> None:
    values = [1e8, 1.0, -1e8, 1.0]  # in float32 the ones are lost
    reports = [make(x=[v]).buffers_bytes() for v in values]
    model = make(x=[0.0])
    assert np.frombuffer(model.average_buffers(reports), "<f4") == 0.5
    assert model.average_buffers(reports[:1]) == reports[0]


def test_buffer_with_changed_dtype_is_refused_by_name() -> None:
    model = make(n=3)
    model.module.n = model.module.n * 0.5  # float32 from now on
    with pytest.raises(UsageError, match=r"buffer n is float32\[\] now and was int64\[\] when"):
        model.buffers_bytes()


def test_weighed_buffers_are_averaged_by_weight() -> None:
    """Fractions are averaged by weight; of whole numbers, the largest is taken."""
    reports = [make(x=[v, 1e8], n=n).buffers_bytes() for v, n in ((1.0, 3), (2.0, 9), (7.0, 4))]
    made = make(x=[0.0, 0.0], n=0).weighed_buffers(reports, [32.0, 16.0, 0.0])
    assert made == np.array([4 / 3, 1e8], "<f4").tobytes() + np.array(9, "<i8").tobytes()


def test_bfloat16_and_empty_buffers_are_averaged() -> None:
    model = make(narrow=torch.tensor([1.0, 3.0], dtype=torch.bfloat16), none=[])
    data = model.buffers_bytes()
    assert len(data) == 4
    assert model.average_buffers([data, data]) == data


def test_model_without_buffers_has_empty_bytes() -> None:
    model = make()
    assert model.buffers_bytes() == b""
    model.load_buffers_bytes(model.average_buffers([b"", b""]))


def test_buffer_bytes_of_another_model_are_refused() -> None:
    with pytest.raises(UsageError, match="5 bytes of buffers, this module has 8"):
        make(x=[0.0, 0.0]).load_buffers_bytes(b"12345")
    with pytest.raises(UsageError, match="belong to another model"):
        make(x=[0.0]).average_buffers([b"1234", b"12345"])
