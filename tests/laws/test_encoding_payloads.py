"""Payloads: what was encoded decodes to the same; any bytes are valid or raise WireError."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from sparkstrom.base.errors import WireError
from sparkstrom.codec import payload as codec
from sparkstrom.encoding import backends, gaps
from sparkstrom.encoding.forms import Form

I32 = NDArray[np.int32]

N_MAX = 2**31 - 1


@st.composite
def hits(draw: st.DrawFn) -> tuple[I32, int]:
    """Draw codes of hits, and a sufficient number of parameters."""
    indices = draw(st.sets(st.integers(0, draw(st.sampled_from([7, 300, N_MAX - 1]))), min_size=1))
    n_params = draw(st.integers(max(indices) + 1, min(N_MAX, max(indices) + 1000)))
    codes = [~i if draw(st.booleans()) else i for i in sorted(indices)]
    return np.array(codes, np.int32), n_params


@given(case=hits(), half=st.integers(1, 2**23))
def test_encoded_gaps_round_trip_within_size_bound(case: tuple[I32, int], half: int) -> None:
    codes, n_params = case
    out = np.zeros(gaps.bytes_max(codes.size, n_params) + gaps.FLUSH_BYTES, np.uint8)
    message = out[: gaps.encode(codes, n_params, out)].tobytes()
    assert len(message) <= gaps.bytes_max(codes.size, n_params)
    indices, quanta = codec.decode_update_untrusted(
        message, Form.GAPS, codes.size, 2 * half, n_params
    )
    np.testing.assert_array_equal(indices, np.where(codes < 0, ~codes, codes))
    np.testing.assert_array_equal(quanta, np.where(codes < 0, -2 * half, 2 * half))


@given(
    payload=st.binary(max_size=80),
    form=st.integers(0, 255),
    count=st.integers(-1, 300),
    tau_quanta=st.one_of(st.integers(-2, 10), st.integers(0, 2**32)),
    n_params=st.one_of(st.integers(1, 300), st.just(N_MAX)),
)
def test_any_update_decodes_or_raises_wire_error(
    payload: bytes, form: int, count: int, tau_quanta: int, n_params: int
) -> None:
    check_update(payload, form, count, tau_quanta, n_params)


@given(payload=st.binary(min_size=1, max_size=40), count=st.integers(1, 40), form=st.integers(1, 3))
@example(payload=bytes([0, 0xFF]), count=4, form=1)
def test_any_update_with_plausible_header_decodes_or_raises_wire_error(
    payload: bytes, count: int, form: int
) -> None:
    check_update(payload, form, count, 6, 4 * len(payload))
    check_update(payload, form, count, 6, 4 * len(payload) - 1)


@given(payload=st.binary(max_size=40), count=st.integers(1, 20), rice=st.integers(0, 32))
def test_any_gaps_payload_decodes_or_raises_wire_error(
    payload: bytes, count: int, rice: int
) -> None:
    check_update(bytes([rice]) + payload, Form.GAPS, count, 2, 1000)


def check_update(payload: bytes, form: int, count: int, tau_quanta: int, n_params: int) -> None:
    """Decode an update; it must raise WireError, or have valid entries in order and in range."""
    arguments = payload, form, count, tau_quanta, n_params
    try:
        indices, quanta = codec.decode_update_untrusted(*arguments)
    except WireError:
        with pytest.raises(WireError):
            codec.read_bitmap_untrusted(*arguments)
        return
    if form in codec.BITMAPS:
        check_bitmap(codec.read_bitmap_untrusted(*arguments), indices, quanta, n_params)
    assert indices.shape == quanta.shape == (count,)
    assert indices.dtype == quanta.dtype == np.int32
    assert indices[0] >= 0
    assert indices[-1] < n_params
    assert (np.diff(indices) > 0).all()
    assert {abs(int(q)) for q in quanta} <= {tau_quanta, tau_quanta // 2}


def check_bitmap(bitmap: codec.Bitmap, indices: I32, quanta: I32, n_params: int) -> None:
    """Assert that adding a bitmap as a whole equals adding its entries one by one."""
    kernels, scratch = backends.kernels(), np.empty(backends.SCRATCH_BYTES, np.uint8)
    whole = np.arange(2 * n_params, dtype=np.float32).reshape(2, n_params)
    singly = whole.copy()
    step = float(bitmap.tau_quanta)
    answer = kernels.bitmap_add_both(*whole, bitmap.packed, bitmap.side, step, 1.0, scratch)
    assert answer == kernels.apply_hits_both(*singly, indices, quanta, 1.0)
    np.testing.assert_array_equal(whole, singly)


@given(payload=st.binary(max_size=40), n_params=st.integers(0, 10), k=st.integers(-103, 20))
def test_any_theta_payload_decodes_or_raises_wire_error(
    payload: bytes, n_params: int, k: int
) -> None:
    try:
        theta = codec.decode_theta_untrusted(payload, n_params, k)
    except WireError:
        pass
    else:
        assert theta.tobytes() == payload
        assert np.isfinite(theta).all()
