"""I1: sent, kept, clipped and scaled-away changes add up to the input; replicas are identical.

All values are multiples of 1/8 on the grid 2^-3, where float32 adds exactly. So the law is tested
with ==, for every backend, both ways to train, every form, aggregation and clipping.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from sparkstrom.base.errors import TrainingError
from sparkstrom.codec.payload import decode_update_untrusted
from sparkstrom.encoding import backends
from sparkstrom.encoding.encoder import Encoded, Encoder
from sparkstrom.encoding.residual import ResidualClipping
from sparkstrom.encoding.tau import WarmUp
from sparkstrom.encoding.thresholds import AdaptiveThreshold, FixedThreshold

F32 = NDArray[np.float32]
K, Q = 3, 0.125

eighths = st.integers(-40, 40).map(lambda quanta: quanta * Q)
thresholds = st.sampled_from(
    [FixedThreshold(0.25), FixedThreshold(1.0), AdaptiveThreshold(0.5, 0.1, 0.4, 0.5)]
)
clippings = st.sampled_from([None, ResidualClipping(1.0, 1), ResidualClipping(2.0, 3)])
aggregations = st.sampled_from(["sum", "mean", "sqrt"])
warm_ups = st.sampled_from([None, WarmUp(1), WarmUp(3, 0.5, 0.1)])
shake_frequencies = st.sampled_from([0, 1, 2])


@st.composite
def trainings(draw: st.DrawFn) -> list[F32]:
    """Draw the changes of a few training steps, f32[n] each, some sparse and some dense."""
    n = draw(st.integers(1, 60))
    some = st.one_of(st.just(0.0), eighths)
    return draw(st.lists(arrays(np.float32, n, elements=some, fill=st.just(0.0)), max_size=8))


@dataclass
class WorkerWithRemoteReplica:
    """One worker, and a replica elsewhere that applies the published updates."""

    encoder: Encoder
    theta: F32
    local: F32
    elsewhere: F32
    sent: float = 0.0

    def learn(self, delta: F32) -> Encoded | None:
        """Add ``delta`` to the residual, publish, and apply the update to the other replica."""
        if self.encoder.train_on == "replica":
            return self._received(self.encoder.publish(delta.copy(), self.theta))
        self.local += delta
        return self._received(self.encoder.publish(self.local, self.theta))

    def _received(self, update: Encoded | None) -> Encoded | None:
        if update is not None:
            form, tau_quanta = int(update.form), update.tau_quanta
            hits = decode_update_untrusted(
                update.payload, form, update.count, tau_quanta, self.theta.size
            )
            backends.kernels().apply_hits(self.elsewhere, *hits, self.encoder.q)
            self.sent += float(np.abs(hits[1]).sum()) * self.encoder.q
        return update

    def held(self) -> F32:
        """Return theta plus residual."""
        return self.theta + self.encoder.residual(self.local, self.theta)

    def destroyed(self) -> float:
        """Return the mass that was clipped or scaled away."""
        counters = self.encoder.counters
        return counters.mass_clipped + counters.mass_scaled_away


def make_worker_with_remote_replica(encoder: Encoder) -> WorkerWithRemoteReplica:
    """Return a worker and a replica with the same initial parameters."""
    start = np.arange(encoder.n_params, dtype=np.float32) * Q
    return WorkerWithRemoteReplica(encoder, start.copy(), start.copy(), start.copy())


@pytest.mark.parametrize("train_on", ["local", "replica"])
@pytest.mark.parametrize("backend", backends.BACKENDS)
@given(
    steps=trainings(),
    threshold=thresholds,
    clipping=clippings,
    aggregation=aggregations,
    workers=st.integers(1, 9),
    warm_up=warm_ups,
    shake_frequency=shake_frequencies,
)
def test_lost_mass_is_counted_as_clipped_or_scaled_away(
    backend: str,
    train_on: str,
    steps: list[F32],
    threshold: FixedThreshold | AdaptiveThreshold,
    clipping: ResidualClipping | None,
    aggregation: str,
    workers: int,
    warm_up: WarmUp | None,
    shake_frequency: int,
) -> None:
    """The mass that disappears in a publication is counted as clipped or scaled away."""
    n_params = steps[0].size if steps else 1
    worker = make_worker_with_remote_replica(
        Encoder(
            n_params,
            K,
            threshold,
            clipping,
            train_on=train_on,
            aggregation=aggregation,
            workers=workers,
            backend=backends.backend(backend),
            warm_up=warm_up,
            shake_frequency=shake_frequency,
        )
    )
    for delta in steps:
        before, counted = worker.held(), worker.destroyed()
        update = worker.learn(delta)
        lost = before + delta - worker.held()
        assert float(np.abs(lost).sum()) == worker.destroyed() - counted
        if aggregation == "sum" and clipping is None:
            assert not lost.any()
        np.testing.assert_array_equal(worker.theta, worker.elsewhere)
        assert update is None or update.count >= 1
    assert worker.encoder.counters.mass_sent == worker.sent


@pytest.mark.parametrize("train_on", ["local", "replica"])
@given(steps=trainings(), threshold=thresholds, clipping=clippings, aggregation=aggregations)
def test_reference_and_cpu_backends_encode_same_bytes(
    train_on: str,
    steps: list[F32],
    threshold: FixedThreshold | AdaptiveThreshold,
    clipping: ResidualClipping | None,
    aggregation: str,
) -> None:
    n_params = steps[0].size if steps else 1
    one, other = (
        make_worker_with_remote_replica(
            Encoder(
                n_params,
                K,
                threshold,
                clipping,
                train_on=train_on,
                aggregation=aggregation,
                workers=3,
                backend=backends.backend(backend),
            )
        )
        for backend in ("reference", "cpu")
    )
    for delta in steps:
        assert one.learn(delta) == other.learn(delta)
        np.testing.assert_array_equal(one.theta, other.theta)
        np.testing.assert_array_equal(one.held(), other.held())
    assert one.encoder.counters == other.encoder.counters


@pytest.mark.parametrize("train_on", ["local", "replica"])
@pytest.mark.parametrize("backend", backends.BACKENDS)
@given(
    delta=arrays(np.float32, st.integers(1, 300), elements=eighths),
    where=st.integers(0, 299),
    bad=st.sampled_from([np.nan, np.inf, -np.inf]),
)
def test_non_finite_input_raises_before_theta_changes(
    backend: str, train_on: str, delta: F32, where: int, bad: float
) -> None:
    """NaN or infinity in the input raises an error before theta changes."""
    where %= delta.size
    delta[where] = bad
    worker = make_worker_with_remote_replica(
        Encoder(
            delta.size,
            K,
            FixedThreshold(0.25),
            train_on=train_on,
            backend=backends.backend(backend),
        )
    )
    with pytest.raises(TrainingError, match=f"parameter {where} became"):
        worker.learn(delta)
    np.testing.assert_array_equal(worker.theta, worker.elsewhere)


@given(
    steps=trainings(),
    remote=trainings(),
    threshold=thresholds,
)
def test_remote_updates_do_not_change_residual(
    steps: list[F32], remote: list[F32], threshold: FixedThreshold | AdaptiveThreshold
) -> None:
    n_params = steps[0].size if steps else 1
    worker = make_worker_with_remote_replica(Encoder(n_params, K, threshold))
    for delta, other in zip(steps, remote, strict=False):
        residual = worker.encoder.residual(worker.local, worker.theta)
        quanta = np.resize(other / Q, n_params).astype(np.int32)
        indices = np.arange(n_params, dtype=np.int32)
        kernels = backends.kernels()
        kernels.apply_hits_both(worker.theta, worker.local, indices, quanta, Q)
        kernels.apply_hits(worker.elsewhere, indices, quanta, Q)
        after = worker.encoder.residual(worker.local, worker.theta)
        np.testing.assert_array_equal(after, residual)
        worker.learn(delta)
        np.testing.assert_array_equal(worker.theta, worker.elsewhere)
