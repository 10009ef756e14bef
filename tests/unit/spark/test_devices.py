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


class OnGpu(DenseNetwork):
    """A network on GPU 1."""

    cuda_device: int | None = 1


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list of GPUs that are requested; each request succeeds."""
    asked: list[int] = []

    def on_device(index: int) -> Any:
        asked.append(index)
        return f"on device {index}"

    monkeypatch.setattr(devices, "on_device", on_device)
    return asked


def test_parameters_lie_on_the_models_gpu(asked: list[int]) -> None:
    assert choose_backend(OnGpu([3, 2])) == "on device 1"
    assert asked == [1]


@pytest.mark.parametrize("kind", [DenseNetwork, OnGpu])
def test_without_one_they_are_on_the_host(
    asked: list[int], monkeypatch: pytest.MonkeyPatch, kind: type[DenseNetwork]
) -> None:
    """Without a GPU, parameters are kept on the host."""
    monkeypatch.setattr(OnGpu, "cuda_device", None)
    assert choose_backend(kind([3, 2])) is backends.host()
    assert asked == []


def test_a_gpu_that_cannot_be_used_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the GPU cannot be used, parameters stay on the host, and a warning has the reason."""

    def refuse(index: int) -> None:
        raise SetupError("no compiler")

    monkeypatch.setattr(devices, "on_device", refuse)
    with caplog.at_level(logging.WARNING):
        assert choose_backend(OnGpu([3, 2])) is backends.host()
    assert "parameters stay on the host, and each step copies them: no compiler" in caplog.text
