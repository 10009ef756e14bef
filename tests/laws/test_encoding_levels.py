"""I1 with levels: sent, kept, clipped and scaled-away changes add up to the input; exact sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from sparkstrom.base.errors import WireError
from sparkstrom.codec import payload as codec
from sparkstrom.encoding import backends, gaps
from sparkstrom.encoding import leveled_gaps as levels
from sparkstrom.encoding import reference_kernels as reference
from sparkstrom.encoding.cpu import kernels as kernels_cpu
from sparkstrom.encoding.encoder import Encoder
from sparkstrom.encoding.forms import Form
from sparkstrom.encoding.layers import Layers
from sparkstrom.encoding.residual import ResidualClipping
from sparkstrom.encoding.tau import WarmUp
from sparkstrom.encoding.thresholds import (
    AdaptiveThreshold,
    AutoThreshold,
    AveragingThreshold,
    FixedThreshold,
    TargetSparsityThreshold,
)
from sparkstrom.encoding.update_sum import UpdateSum
from tests.unit.encoding.sums_bound import sum_bytes_bound

I32 = NDArray[np.int32]
K, Q = 3, 0.125

eighths = st.integers(-160, 160).map(lambda quanta: quanta * Q)
tied = st.sampled_from([-1.0, 1.0])
thresholds = st.sampled_from(
    [
        FixedThreshold(0.25, 4),
        FixedThreshold(1.0, 2),
        AdaptiveThreshold(0.5, 0.1, 0.4, 0.5, levels=3),
        TargetSparsityThreshold(0.5, 0.05, levels=4),
        AutoThreshold(0.05, 0.2),
        AutoThreshold(0.5, 0.9),
        AutoThreshold(0.05, 0.1, levels=1),
        AveragingThreshold(0.05, 0.1, large_every=2),
        AveragingThreshold(0.05, 0.1, levels=2, large_every=1),
    ]
)


@st.composite
def layered(draw: st.DrawFn) -> Layers:
    """Draw layers with different sizes and threshold multipliers."""
    sizes = draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
    multipliers = draw(st.lists(st.integers(1, 5), min_size=len(sizes), max_size=len(sizes)))
    return Layers(tuple(np.cumsum(sizes).tolist()), tuple(multipliers))


@pytest.mark.parametrize("train_on", ["local", "replica"])
@given(
    layers=layered(),
    use_layers=st.booleans(),
    aggregation=st.sampled_from(["sum", "mean", "sqrt"]),
    clipping=st.sampled_from([None, ResidualClipping(1.0, 2)]),
    threshold=thresholds,
    warm_up=st.sampled_from([None, WarmUp(2)]),
    shake_frequency=st.sampled_from([0, 2]),
    round_s=st.sampled_from([0.01, 9.0]),
    workers=st.sampled_from([2, 4, 5]),
    data=st.data(),
)
def test_leveled_encoding_counts_lost_mass_equally_on_both_backends(
    train_on: str,
    layers: Layers,
    use_layers: bool,
    aggregation: str,
    clipping: ResidualClipping | None,
    threshold: Any,
    warm_up: WarmUp | None,
    shake_frequency: int,
    round_s: float,
    workers: int,
    data: st.DataObject,
) -> None:
    """The mass that disappears is counted as clipped or scaled away; both backends are equal."""
    n, used = layers.stops[-1], layers if use_layers else None
    options = {
        "train_on": train_on,
        "aggregation": aggregation,
        "workers": workers,
        "warm_up": warm_up,
        "shake_frequency": shake_frequency,
        "layers": used,
    }
    encoders = [
        Encoder(n, K, threshold, clipping, backend=backends.backend(backend), **options)
        for backend in ("reference", "cpu")
    ]
    theta, local = np.zeros((2, 2, n), np.float32)
    elsewhere, sent = np.zeros(n, np.float32), 0.0
    counters = encoders[0].counters
    for number in range(4):
        elements = data.draw(st.sampled_from([eighths, tied]))
        delta = data.draw(arrays(np.float32, n, elements=elements))
        held = theta[0] + encoders[0].residual(local[0], theta[0])
        counted = counters.mass_clipped + counters.mass_scaled_away
        local += delta
        one, other = (
            encoder.publish(
                local[i] if train_on == "local" else delta.copy(), theta[i], is_last=number == 3
            )
            for i, encoder in enumerate(encoders)
        )
        assert one == other
        if one is not None:
            announced = (one.form, one.count, one.tau_quanta, n, used)
            hits = codec.decode_update_untrusted(one.payload, *announced)
            backends.kernels().apply_hits(elsewhere, *hits, Q)
            sent += float(np.abs(hits[1]).sum()) * Q
        np.testing.assert_array_equal(theta[0], elsewhere)
        np.testing.assert_array_equal(theta[0], theta[1])
        lost = held + delta - theta[0] - encoders[0].residual(local[0], theta[0])
        destroyed = counters.mass_clipped + counters.mass_scaled_away - counted
        # A large update may send more than the residual; clipping takes some of that back.
        every = threshold.large_every if isinstance(threshold, AveragingThreshold) else 0
        is_large = every > 0 and workers >= 4 and (number == 3 or (number + 1) % every == 0)
        takes_back = clipping is not None and is_large
        lost_mass = float(np.abs(lost).sum())
        assert lost_mass == destroyed or (takes_back and lost_mass < destroyed)
        for encoder in encoders:
            encoder.follow_link(round_s, 0.1)
    assert encoders[1].counters == counters
    assert counters.mass_sent == sent


values = arrays(np.float32, st.integers(1, 600), elements=st.floats(-20, 20, width=32))


@given(local=values, tau=st.integers(1, 2**10), limit=st.integers(0, 2**32), seed=st.integers(0))
def test_level_kernels_equal_reference(
    local: NDArray[np.float32], tau: int, limit: int, seed: int
) -> None:
    """The fast kernels for levels give the same results as the reference kernels."""
    seed, n, answers = seed % 2**32, local.size, []
    tau_here = np.float32(2 * tau * 2.0**-8)
    theta = np.roll(local, 1) / np.float32(2)
    for kernels in (reference, kernels_cpu):
        codes, answer = np.zeros(n, np.int32), []
        for name, parts in (("local", (local, theta)), ("replica", (local,))):
            choose = getattr(kernels, f"choose_{name}")
            find = getattr(kernels, f"find_levels_{name}")
            short = np.zeros(n // 3, np.int32)
            answer += [choose(*parts, tau_here, limit, seed, short), short.tolist()]
            hits = choose(*parts, tau_here, limit, seed, codes)
            of = np.zeros(hits, np.uint8)
            answer += [hits, codes[:hits].tolist(), find(*parts, codes[:hits], tau_here, 3, of)]
            moved, other = theta.copy(), local.copy()
            for other_step in (0.0, -tau_here):
                answer.append(
                    kernels.move_by_levels(
                        moved, other, codes[:hits], of, tau_here, other_step, 2.0**-20
                    )
                )
            kernels.shift_codes(codes[:hits], limit >> 2)
            answer += [of.tolist(), moved.tolist(), other.tolist(), codes[:hits].tolist()]
        answers.append(answer)
    assert answers[0] == answers[1]


@given(local=values, sign=st.sampled_from([-1, 1]), seed=st.integers(0), size=st.integers(0, 99))
def test_sample_kernel_equals_reference(
    local: NDArray[np.float32], sign: int, seed: int, size: int
) -> None:
    """The fast sampling kernel gives the same sample as the reference kernel, also with NaN."""
    theta, answers = np.roll(local, 1) / np.float32(3), []
    local[seed % local.size] = np.nan
    for kernels in (reference, kernels_cpu):
        where, sizes = np.full(size, -1, np.int32), np.zeros(size, np.float32)
        kernels.sample(local, theta, sign, seed % 2**32, where, sizes)
        answers.append((where.tobytes(), sizes.tobytes()))
        assert np.isin(where, np.arange(local.size)).all()
    assert answers[0] == answers[1]


def test_sample_draws_parameters_with_equal_probability() -> None:
    """A sample contains each parameter with equal probability."""
    n, zeros = 1000, np.zeros(1000, np.float32)
    where, sizes, counts = np.zeros(500, np.int32), np.zeros(500, np.float32), np.zeros(n)
    for seed in range(200):
        kernels_cpu.sample(np.arange(n, dtype=np.float32), zeros, 1, seed, where, sizes)
        np.testing.assert_array_equal(sizes, where)
        counts += np.bincount(where, minlength=n)
    assert counts.mean() == 100
    assert counts.std() == pytest.approx(10, rel=0.1)  # as in a Poisson distribution


@given(tau=st.sampled_from([0.25, 1.0]), seed=st.integers(0, 2**32 - 1))
def test_values_between_tau_and_twice_tau_are_chosen_at_random(tau: float, seed: int) -> None:
    """Values from 2 tau are always chosen, those below tau never, others with a probability."""
    residual = np.array([tau, -tau, 2 * tau, -3 * tau, 0.9 * tau] * 70, np.float32)
    codes = np.zeros(400, np.int32)
    for kernels in (reference, kernels_cpu):
        assert kernels.choose_replica(residual, tau, 2**32, seed, codes) == 280
        assert kernels.choose_replica(residual, tau, 0, seed, codes) == 140
        half = kernels.choose_replica(residual, tau, 2**31, seed, codes) - 140
        assert 35 < half < 105


@st.composite
def leveled(draw: st.DrawFn) -> tuple[I32, NDArray[np.uint8], int]:
    """Draw codes of hits, their levels, and a sufficient number of parameters."""
    most = draw(st.sampled_from([7, 300, 2**31 - 2]))
    indices = sorted(draw(st.sets(st.integers(0, most), min_size=1, max_size=200)))
    codes = [~i if draw(st.booleans()) else i for i in indices]
    of = draw(st.lists(st.integers(0, 3), min_size=len(codes), max_size=len(codes)))
    of[draw(st.integers(0, len(of) - 1))] = draw(st.integers(1, 3))
    return np.array(codes, np.int32), np.array(of, np.uint8), max(indices) + 1


@given(case=leveled(), half=st.integers(1, 2**20))
def test_encoded_levels_round_trip_within_size_bound(
    case: tuple[I32, NDArray[np.uint8], int], half: int
) -> None:
    """Encoded levels decode to the same entries, and the message is within its size bound."""
    codes, of, n_params = case
    top = int(of.max())
    out = np.full(levels.bytes_max(codes.size, n_params, top) + gaps.FLUSH_BYTES, 255, np.uint8)
    message = out[: levels.encode(codes, of, top, n_params, out)].tobytes()
    assert len(message) <= levels.bytes_max(codes.size, n_params, top)
    indices, quanta = codec.decode_update_untrusted(
        message, Form.LEVELS, codes.size, 2 * half, n_params
    )
    np.testing.assert_array_equal(indices, np.where(codes < 0, ~codes, codes))
    steps = 2 * half * 2 ** of.astype(np.int64)
    np.testing.assert_array_equal(quanta, np.where(codes < 0, -steps, steps))


sparse = st.integers(1, 400).flatmap(
    lambda n: arrays(
        np.int32,
        n,
        elements=st.sampled_from([0, 2, -2, 6, 640, -512, 2**31 - 1, -(2**31), 7, -5000]),
        fill=st.just(0),
    )
)


@given(array=sparse)
def test_encoded_sums_round_trip_within_size_bound(array: I32) -> None:
    total, entries = UpdateSum.of_array(array), int(np.count_nonzero(array))
    payload = codec.encode_quanta(total)
    largest = int(np.abs(array.astype(np.int64)).max())
    for more in (0, 1, 50):
        assert len(payload) <= sum_bytes_bound(entries + more, array.size, largest)
    read = codec.decode_quanta_untrusted(payload, array.size)
    np.testing.assert_array_equal(read.dense(), array)


@given(payload=st.binary(max_size=60), n_params=st.integers(0, 40), layout=st.integers(0, 5))
def test_any_bytes_decode_to_sum_or_raise_wire_error(
    payload: bytes, n_params: int, layout: int
) -> None:
    """Any bytes are a valid sum or raise WireError."""
    try:
        total = codec.decode_quanta_untrusted(bytes([layout]) + payload, n_params)
    except WireError:
        return
    again = codec.decode_quanta_untrusted(codec.encode_quanta(total), n_params)
    np.testing.assert_array_equal(again.dense(), total.dense())


@given(n=st.integers(1, 200), parts=st.lists(st.integers(0, 2**32 - 1), max_size=6))
def test_sparse_sum_equals_dense_sum(n: int, parts: list[int]) -> None:
    """A sparse sum of updates equals the dense one."""
    dense, total, other = np.zeros(n, np.int32), UpdateSum(n), UpdateSum(n)
    for number, seed in enumerate(parts):
        random = np.random.default_rng(seed)
        where = np.flatnonzero(random.random(n) < random.choice([0.02, 0.5])).astype(np.int32)
        quanta = random.integers(-3, 4, where.size).astype(np.int32) * np.int32(2**29)
        dense[where] += quanta  # int32 overflow wraps around, as in sums
        (total if number % 2 else other).add((where, quanta))
    total.add_total(other)
    np.testing.assert_array_equal(total.dense(), dense)
    indices, quanta = total.hits
    np.testing.assert_array_equal(indices, np.flatnonzero(dense))
    np.testing.assert_array_equal(quanta, dense[indices])
