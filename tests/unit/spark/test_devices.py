"""Tests of choose_backend: parameters are kept on the model's GPU if possible."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from sparkstrom.base.errors import SetupError
from sparkstrom.encoding import backends
from sparkstrom.models import DenseNetwork
from sparkstrom.worker import training_task as devices
from sparkstrom.worker.training_task import choose_backend


class GpuNetwork(DenseNetwork):
    """A network on GPU 1."""

    cuda_device: int | None = 1


@pytest.fixture
def requested_gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list of GPUs that are requested; each request succeeds."""
    asked: list[int] = []

    def on_device(index: int) -> Any:
        asked.append(index)
        return f"on device {index}"

    monkeypatch.setattr(devices, "on_device", on_device)
    return asked


def test_parameters_are_kept_on_gpu_of_model(requested_gpus: list[int]) -> None:
    assert choose_backend(GpuNetwork([3, 2])) == "on device 1"
    assert requested_gpus == [1]


@pytest.mark.parametrize("kind", [DenseNetwork, GpuNetwork])
def test_parameters_without_gpu_are_kept_on_host(
    requested_gpus: list[int], monkeypatch: pytest.MonkeyPatch, kind: type[DenseNetwork]
) -> None:
    """Without a GPU, parameters are kept on the host."""
    monkeypatch.setattr(GpuNetwork, "cuda_device", None)
    assert choose_backend(kind([3, 2])) is backends.host()
    assert requested_gpus == []


def test_unusable_gpu_keeps_parameters_on_host_and_warns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the GPU cannot be used, parameters stay on the host, and a warning has the reason."""

    def refuse(index: int) -> None:
        raise SetupError("no compiler")

    monkeypatch.setattr(devices, "on_device", refuse)
    with caplog.at_level(logging.WARNING):
        assert choose_backend(GpuNetwork([3, 2])) is backends.host()
    assert "parameters stay on the host, and each step copies them: no compiler" in caplog.text
