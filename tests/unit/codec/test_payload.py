"""Tests of payloads by example: each check raises ``WireError`` with its reason."""

from __future__ import annotations

import numpy as np
import pytest

from sparkstrom.base.errors import WireError
from sparkstrom.codec import payload as codec
from sparkstrom.encoding.forms import Form

HITS = bytes([2, 0b01101010, 0])  # index 5 +tau, index 6 -tau, with Rice parameter 2
BITS = bytes([0b11_00_10_01, 0b01])  # +tau, -tau, none, half a step; +tau


def test_gaps_payload_is_decoded() -> None:
    indices, quanta = codec.decode_update_untrusted(HITS, Form.GAPS, 2, 10, 7)
    assert (indices.tolist(), quanta.tolist()) == ([5, 6], [10, -10])


@pytest.mark.parametrize(("form", "half"), [(Form.BITMAP_UP, 5), (Form.BITMAP_DOWN, -5)])
def test_bitmap_payload_is_decoded(form: Form, half: int) -> None:
    indices, quanta = codec.decode_update_untrusted(BITS, form, 4, 10, 5)
    assert (indices.tolist(), quanta.tolist()) == ([0, 1, 3, 4], [10, -10, half, 10])


@pytest.mark.parametrize(
    ("payload", "form", "count", "tau_quanta", "n_params", "why"),
    [
        (HITS, 0, 2, 10, 7, "form 1, 2, 3 or 7"),
        (HITS, Form.QUANTA, 2, 10, 7, "form 1, 2, 3 or 7"),
        (HITS, Form.GAPS, 0, 10, 7, "0 entries"),
        (HITS, Form.GAPS, 8, 10, 7, "8 entries for 7"),
        (HITS, Form.GAPS, 2, 9, 7, "even"),
        (HITS, Form.GAPS, 2, 0, 7, "even"),
        (HITS, Form.GAPS, 2, 2**24 + 2, 7, r"within 2 \.\. 2\^24"),
        (HITS, Form.GAPS, 2, 10, 6, "beyond the parameters"),
        (HITS, Form.GAPS, 1, 10, 7, "left over"),
        (HITS, Form.GAPS, 3, 10, 7, "do not fit"),
        (HITS, Form.GAPS, 2**31 - 1, 10, 2**31 - 1, "cannot hold so many"),
        (b"", Form.GAPS, 1, 10, 7, "cannot hold so many"),
        (BITS, Form.BITMAP_UP, 4, 10, 9, "2 bytes for 9"),
        (BITS, Form.BITMAP_UP, 3, 10, 5, "holds 4 entries"),
        (bytes([0, 0b0100]), Form.BITMAP_UP, 1, 10, 5, "padding"),
    ],
)
def test_malformed_update_payload_is_refused(
    payload: bytes, form: int, count: int, tau_quanta: int, n_params: int, why: str
) -> None:
    with pytest.raises(WireError, match=why):
        codec.decode_update_untrusted(payload, form, count, tau_quanta, n_params)


def test_dense_sum_is_little_endian_and_decoded_as_writable() -> None:
    total = np.array([1, -2, 2**31 - 1], np.int32)
    payload = b"\4\1\0\0\0" + total.tobytes()
    read = codec.decode_quanta_untrusted(payload, 3)
    np.testing.assert_array_equal(read.array, total)
    read.add((np.array([1], np.int32), np.array([7], np.int32)))
    assert read.dense().tolist() == [1, 5, 2**31 - 1]
    with pytest.raises(WireError, match="17 bytes for 4 parameters"):
        codec.decode_quanta_untrusted(payload, 4)


def test_snapshot_chunk_round_trip_beyond_exact_range() -> None:
    theta = np.array([0.0, 0.25, -3.5, 2.0**30], np.float32)
    read = codec.decode_theta_untrusted(codec.encode_theta(theta), 4, 2)
    np.testing.assert_array_equal(read, theta)


@pytest.mark.parametrize("bad", [0.125, -0.0, np.nan, np.inf])
def test_snapshot_chunk_with_value_off_grid_is_refused(bad: float) -> None:
    payload = codec.encode_theta(np.array([1.0, bad], np.float32))
    with pytest.raises(WireError, match="value 1 is"):
        codec.decode_theta_untrusted(payload, 2, 2)


def test_snapshot_chunk_of_wrong_size_is_refused() -> None:
    with pytest.raises(WireError, match="8 bytes for 3 parameters"):
        codec.decode_theta_untrusted(bytes(8), 3, 2)
