"""Tests of SparseLoCo's messages: which values are sent, and in how many bytes."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.slow_link.sparse import CHUNK, add_decoded, encode, message_bytes


def decode_message(message: np.ndarray, n_params: int, keep: int) -> np.ndarray:
    out = np.zeros(n_params, np.float32)
    add_decoded(message, out, 1.0, keep)
    return out


def compute_expected(values: np.ndarray, keep: int) -> np.ndarray:
    """Return the largest of each chunk, rounded to the mean of their smaller or larger half."""
    out = np.zeros_like(values)
    for first in range(0, len(values), CHUNK):
        chunk = values[first : first + CHUNK]
        largest = np.argsort(-np.abs(chunk))[:keep]
        magnitudes = np.abs(chunk[largest])
        middle = np.median(magnitudes)
        for index, magnitude in zip(largest, magnitudes, strict=True):
            half = magnitudes[(magnitudes > middle) == (magnitude > middle)]
            out[first + index] = np.sign(chunk[index]) * half.mean()
    return out


@pytest.mark.parametrize("n_params", [CHUNK, 3 * CHUNK, 3 * CHUNK - 1000])
@pytest.mark.parametrize("keep", [8, 64])
def test_largest_values_of_chunk_are_sent_in_two_magnitudes(n_params: int, keep: int) -> None:
    """The largest values of each chunk are sent with a sign and one of two magnitudes."""
    values = np.random.default_rng(n_params + keep).normal(size=n_params).astype(np.float32)
    message = encode(values, keep)
    assert message.dtype == np.uint8
    assert message.size == message_bytes(n_params, keep)
    arrived = decode_message(message, n_params, keep)
    assert np.count_nonzero(arrived) == keep * -(-n_params // CHUNK)
    np.testing.assert_allclose(arrived, compute_expected(values, keep), rtol=1e-6)


def test_message_takes_14_bits_per_kept_value() -> None:
    """A kept value takes 2 bits and its position 12; each chunk has two magnitudes."""
    assert message_bytes(100 * CHUNK, 64) == 100 * (2 * 4 + 64 * (12 + 2) // 8)


def test_zero_and_constant_chunks_are_decoded() -> None:
    assert not decode_message(encode(np.zeros(CHUNK, np.float32), 8), CHUNK, 8).any()
    alike = decode_message(encode(np.full(CHUNK, -2.0, np.float32), 8), CHUNK, 8)
    assert sorted(alike)[:9] == [-2.0] * 8 + [0.0]


def test_short_last_chunk_is_sent_whole() -> None:
    """A last chunk with fewer entries than are kept per chunk is sent whole."""
    values = np.full(CHUNK + 3, 1.0, np.float32)
    arrived = decode_message(encode(values, 8), CHUNK + 3, 8)
    assert (arrived[CHUNK:] > 0).all()


def test_error_feedback_delivers_unsent_values_later() -> None:
    """With error feedback, the mean of many messages of one vector approaches the vector."""
    values = np.random.default_rng(5).normal(size=CHUNK).astype(np.float32)
    unsent, arrived = np.zeros_like(values), np.zeros_like(values)
    for _ in range(400):
        unsent += values
        message = encode(unsent)
        add_decoded(message, unsent, -1.0)
        add_decoded(message, arrived, 1.0)
    np.testing.assert_allclose(arrived / 400, values, atol=0.25)
