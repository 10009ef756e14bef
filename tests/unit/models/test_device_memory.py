"""Tests of a TorchModel on a device's memory, as far as that is possible without a device.

The device's memory is a host array that claims to be on a device.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sparkstrom.base.errors import UsageError
from sparkstrom.models.base import Batch, DeviceModel, Flat, Share
from sparkstrom.models.torch import TorchModel, flat_module

N = 12
BATCH = Batch(np.ones((4, 3), np.float32), np.zeros(4, np.int64))


class ArrayClaimingDevice:
    """A host array that claims to be on a device."""

    def __init__(self, array: Flat, **told: Any) -> None:
        self.array = array
        self.__cuda_array_interface__ = {
            "version": 3,
            "data": (array.ctypes.data, False),
            "shape": array.shape,
            "strides": None,
            "typestr": "<f4",
            **told,
        }


@pytest.fixture
def torch_model() -> TorchModel:
    return TorchModel(nn.Linear(3, 3), nn.CrossEntropyLoss(), partial(torch.optim.SGD, lr=0.1))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch use such an array as its memory, as it does with a device's array."""
    monkeypatch.setattr(torch, "as_tensor", lambda told, device: torch.from_numpy(told.array))


@pytest.mark.usefixtures("device")
def test_step_changes_device_parameters_in_place(torch_model: TorchModel) -> None:
    start = torch_model.initial()
    params = start.copy()
    torch_model.bind(ArrayClaimingDevice(params))
    assert next(torch_model.module.parameters()).data_ptr() == params.ctypes.data
    loss = torch_model.step(BATCH)
    assert (params != start).any()
    alone = np.array(start)
    other = TorchModel(nn.Linear(3, 3), nn.CrossEntropyLoss(), partial(torch.optim.SGD, lr=0.1))
    other.bind(alone)
    assert other.step(BATCH) == loss
    np.testing.assert_array_equal(params, alone)


@pytest.mark.parametrize(
    "told",
    [
        {"shape": (N + 1,)},
        {"shape": (N, 1)},
        {"typestr": "<f8"},
        {"strides": (8,)},
        {"data": (1, True)},
    ],
    ids=str,
)
@pytest.mark.usefixtures("device")
def test_unsuitable_device_memory_is_refused(torch_model: TorchModel, told: dict[str, Any]) -> None:
    """Device memory of another shape or type, not contiguous or read-only, is refused."""
    with pytest.raises(UsageError, match=r"on a device: need <f4\[12\], contiguous and writable"):
        torch_model.bind(ArrayClaimingDevice(np.zeros(N, np.float32), **told))


def test_memory_of_another_device_is_refused(
    torch_model: TorchModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch copies an array of another device, and training the copy would have no effect."""
    monkeypatch.setattr(torch, "as_tensor", lambda told, device: torch.zeros(N))
    with pytest.raises(UsageError, match="parameters of a different device than cpu"):
        torch_model.bind(ArrayClaimingDevice(np.zeros(N, np.float32)))


@pytest.mark.parametrize(
    ("where", "index"),
    [("cpu", None), ("cuda:0", 0), ("cuda:3", 3), ("cuda", 2)],
)
def test_cuda_device_is_index_of_gpu_after_place(
    torch_model: TorchModel, monkeypatch: pytest.MonkeyPatch, where: str, index: int | None
) -> None:
    """After place(), cuda_device is the GPU's index, or None on the CPU."""
    monkeypatch.setattr(flat_module, "choose_device", lambda wanted, gpu: torch.device(where))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert isinstance(torch_model, DeviceModel)
    assert torch_model.cuda_device is None
    torch_model.place(Share(threads=1, gpu=None, seed=0))
    assert torch_model.cuda_device == index
