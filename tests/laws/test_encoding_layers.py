"""I1 with thresholds per layer: sent, kept, clipped and scaled-away changes add up to the input.

Values are multiples of 1/8 on the grid 2^-3, where float32 adds exactly, so the law holds with ==.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkstrom.codec.payload import decode_update_untrusted
from sparkstrom.encoding import backends
from sparkstrom.encoding.encoder import Encoder
from sparkstrom.encoding.layers import Layers
from sparkstrom.encoding.residual import ResidualClipping
from sparkstrom.encoding.tau import WarmUp
from sparkstrom.encoding.thresholds import AdaptiveThreshold, FixedThreshold

K = 3  # q = 1/8

eighths = st.integers(-40, 40).map(lambda quanta: quanta / 8)


@st.composite
def layered(draw: st.DrawFn) -> Layers:
    """Draw layers with different sizes and threshold multipliers."""
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    multipliers = draw(st.lists(st.integers(1, 5), min_size=len(sizes), max_size=len(sizes)))
    return Layers(tuple(np.cumsum(sizes).tolist()), tuple(multipliers))


@pytest.mark.parametrize("train_on", ["local", "replica"])
@given(
    layers=layered(),
    aggregation=st.sampled_from(["sum", "mean"]),
    clipping=st.sampled_from([None, ResidualClipping(1.0, 2)]),
    threshold=st.sampled_from([FixedThreshold(0.5), AdaptiveThreshold(0.5, 0.1, 0.4, 0.5)]),
    warm_up=st.sampled_from([None, WarmUp(2)]),
    data=st.data(),
)
def test_layered_encoding_counts_lost_mass_equally_on_both_backends(
    train_on: str,
    layers: Layers,
    aggregation: str,
    clipping: ResidualClipping | None,
    threshold: FixedThreshold,
    warm_up: WarmUp | None,
    data: st.DataObject,
) -> None:
    """The mass that disappears is counted as clipped or scaled away; both backends are equal."""
    n = layers.stops[-1]
    encoders = [
        Encoder(
            n,
            K,
            threshold,
            clipping,
            train_on=train_on,
            aggregation=aggregation,
            workers=2,
            backend=backends.backend(backend),
            warm_up=warm_up,
            shake_frequency=2,
            layers=layers,
        )
        for backend in ("reference", "cpu")
    ]
    theta, local = np.zeros((2, 2, n), np.float32)
    elsewhere = np.zeros(n, np.float32)
    for _ in range(4):
        delta = np.array(data.draw(st.lists(eighths, min_size=n, max_size=n)), np.float32)
        held = theta[0] + encoders[0].residual(local[0], theta[0])
        counted = encoders[0].counters.mass_clipped + encoders[0].counters.mass_scaled_away
        local += delta
        one, other = (
            encoder.publish(local[i] if train_on == "local" else delta.copy(), theta[i])
            for i, encoder in enumerate(encoders)
        )
        assert one == other
        if one is not None:
            hits = decode_update_untrusted(
                one.payload, one.form, one.count, one.tau_quanta, n, layers
            )
            backends.kernels().apply_hits(elsewhere, *hits, encoders[0].q)
        np.testing.assert_array_equal(theta[0], elsewhere)
        np.testing.assert_array_equal(theta[0], theta[1])
        lost = held + delta - theta[0] - encoders[0].residual(local[0], theta[0])
        counters = encoders[0].counters
        destroyed = counters.mass_clipped + counters.mass_scaled_away - counted
        assert float(np.abs(lost).sum()) == destroyed
    assert encoders[0].counters == encoders[1].counters
