"""Tests of the broadcast of initial parameters: exact, compact, and destroyed after the fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sparkstrom.encoding.grid import KEPT_QUANTA, first_exponent, round_to_grid
from sparkstrom.runtime.theta import Theta
from sparkstrom.worker.training_job import (
    BLOCK_SIZE_OPTION,
    PackedParameters,
    TrainingJob,
    broadcast_parameters,
    pack_parameters,
    unpack_parameters,
)
from sparkstrom.worker.training_task import load_initial_theta

K, WORKERS = 20, 4


def make_theta(values: Any, k: int = K, buffers: bytes = b"") -> Theta:
    """Return a Theta with these values, which are multiples of 2^-k."""
    theta = Theta(len(values), k)
    theta.load(np.asarray(values, np.float32))
    theta.buffers = buffers
    return theta


@given(arrays(np.int32, st.integers(0, 300), elements=st.integers(-KEPT_QUANTA, KEPT_QUANTA)))
def test_packed_parameters_unpack_bit_identical(quanta: Any) -> None:
    theta = make_theta(np.ldexp(quanta.astype(np.float32), -K), buffers=b"statistics")
    values, buffers = unpack_parameters(pack_parameters(theta), theta.n_params, K)
    assert values.tobytes() == theta.to_host().tobytes()
    assert buffers == b"statistics"


@pytest.mark.parametrize(("scale", "bytes_each"), [(1e-3, 2.2), (0.05, 2.3), (1e6, 2.7)])
def test_packed_parameter_takes_less_than_three_bytes(scale: float, bytes_each: float) -> None:
    values = (scale * np.random.default_rng(1).standard_normal(10_000)).astype(np.float32)
    k = first_exponent(values)
    packed = pack_parameters(make_theta(round_to_grid(values, k), k))
    assert sum(map(len, packed)) < bytes_each * len(values)
    assert (
        unpack_parameters(packed, len(values), k)[0].tobytes() == round_to_grid(values, k).tobytes()
    )


class Conf:
    """A fake of the SparkConf in the JVM."""

    def __init__(self, **known: str) -> None:
        self.known = known

    def contains(self, key: str) -> bool:
        return key in self.known

    def set(self, key: str, value: str) -> None:
        self.known[key] = value

    def remove(self, key: str) -> None:
        del self.known[key]


class Context:
    """A fake SparkContext that makes broadcasts; the context itself is their handle."""

    def __init__(self, **known: str) -> None:
        self._conf = Conf(**known)
        self.value: PackedParameters | None = None
        self.block_sizes: list[str | None] = []

    @property
    def _jsc(self) -> Any:
        return self

    def sc(self) -> Any:
        return self

    def conf(self) -> Conf:
        return self._conf

    def broadcast(self, value: PackedParameters) -> Any:
        self.block_sizes.append(self._conf.known.get(BLOCK_SIZE_OPTION))
        self.value = value
        return self

    def destroy(self) -> None:
        self.value = None


@pytest.mark.parametrize(
    ("n_params", "workers", "size"),
    [
        (10, 100, "64k"),
        (8 << 20, 2, "1024k"),
        (8 << 20, 8, "512k"),
        (8 << 20, 100, "256k"),
        (200 << 20, 100, "4096k"),
    ],
)
def test_broadcast_block_size_fits_parameters_and_is_reset(
    monkeypatch: pytest.MonkeyPatch, n_params: int, workers: int, size: str
) -> None:
    """The block size fits parameters and workers, and is reset after the broadcast."""
    planes: Any = range(n_params)  # only its length is used
    packed = PackedParameters(planes, planes, b"", b"", b"")
    pack = "sparkstrom.worker.training_job.pack_parameters"
    monkeypatch.setattr(pack, lambda theta, state: packed)
    context = Context()
    with broadcast_parameters(context, make_theta([]), workers):
        assert context._conf.known == {}
    assert context.block_sizes == [size]


def test_configured_broadcast_block_size_is_kept() -> None:
    context = Context(**{BLOCK_SIZE_OPTION: "1m"})
    with broadcast_parameters(context, make_theta([0.5]), WORKERS):
        pass
    assert context.block_sizes == ["1m"]
    assert context._conf.known == {BLOCK_SIZE_OPTION: "1m"}


def test_broadcast_is_destroyed_if_fit_fails() -> None:
    """The broadcast variable is destroyed also if the fit fails."""
    context = Context()

    def fit() -> None:
        with broadcast_parameters(context, make_theta([0.5]), WORKERS) as handle:
            assert handle.value is not None
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit()
    assert context.value is None


def test_worker_starts_from_broadcast_parameters_or_zeros(
    make_job: Callable[..., TrainingJob],
) -> None:
    """A worker starts with the broadcast parameters and buffers, or with zeros without any."""
    job = make_job()
    values = np.linspace(-1, 1, job.spec.n_params, dtype=np.float32)
    theta = make_theta(round_to_grid(values, job.k), job.k, b"statistics")
    context = Context()
    with broadcast_parameters(context, theta, WORKERS) as handle:
        begun = load_initial_theta(replace(job, initial=handle))
    assert begun.to_host().tobytes() == theta.to_host().tobytes()
    assert (begun.buffers, begun.commit) == (b"statistics", 0)
    assert not load_initial_theta(job).to_host().any()
