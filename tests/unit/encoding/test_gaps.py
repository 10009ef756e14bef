"""Tests of gaps against a definition that writes bits as text, and of malformed bytes."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from sparkstrom.encoding import gaps


def message(codes: list[int], n_params: int) -> bytes:
    """Encode the codes."""
    array = np.array(codes, np.int32)
    out = np.zeros(gaps.bytes_max(array.size, n_params) + gaps.FLUSH_BYTES, np.uint8)
    return out[: gaps.encode(array, n_params, out)].tobytes()


def encode_as_text(codes: list[int], rice: int) -> bytes:
    """Return the message by a definition that writes strings of bits, the lowest bit first."""
    bits, previous = "", -1
    for code in codes:
        index = code if code >= 0 else ~code
        gap = index - previous - 1
        low = format(gap % 2**rice, f"0{rice}b")[::-1] if rice else ""
        bits += "0" * (gap >> rice) + "1" + ("1" if code < 0 else "0") + low
        previous = index
    bits += "0" * (-len(bits) % 8)
    body = bytes(int(bits[i : i + 8][::-1], 2) for i in range(0, len(bits), 8))
    return bytes([rice]) + body


def read(
    payload: bytes, count: int, n_params: int
) -> tuple[int, NDArray[np.int32], NDArray[np.int32]]:
    """Return the reason's number (0 if there is none), the indices and the amounts."""
    indices, amounts = np.zeros(count, np.int32), np.zeros(count, np.int32)
    array = np.frombuffer(payload, np.uint8)
    return gaps.read_gaps(array, n_params, 6, indices, amounts), indices, amounts


CASES = [
    ([0], 1),
    ([~0], 1),
    ([9], 10),
    ([0, ~1, 2, ~3], 4),
    ([~7, 100, 101, ~5000, 9999], 10_000),
    ([~(2**31 - 2)], 2**31 - 1),
    ([0, 2**31 - 2], 2**31 - 1),
]


@pytest.mark.parametrize(("codes", "n_params"), CASES)
def test_gaps_message_has_documented_layout(codes: list[int], n_params: int) -> None:
    payload = message(codes, n_params)
    assert payload == encode_as_text(codes, payload[0])
    assert len(payload) <= gaps.bytes_max(len(codes), n_params)


@pytest.mark.parametrize(("codes", "n_params"), CASES)
def test_gaps_round_trip(codes: list[int], n_params: int) -> None:
    answer, indices, amounts = read(message(codes, n_params), len(codes), n_params)
    assert answer == 0
    assert indices.tolist() == [c if c >= 0 else ~c for c in codes]
    assert amounts.tolist() == [6 if c >= 0 else -6 for c in codes]


def test_worked_example_of_gaps_message() -> None:
    # Rice parameter 2. Index 5 up: gap 5 = 1 * 4 + 1 is 0 1, sign 0, low bits 10.
    # Index 6 down: gap 0 is 1, sign 1, low bits 00. First bit lowest: 01010110 0(0000000).
    payload = bytes([2, 0b01101010, 0])
    assert encode_as_text([5, ~6], 2) == payload
    assert read(payload, 2, 7)[1].tolist() == [5, 6]
    assert read(payload, 2, 7)[2].tolist() == [6, -6]


@pytest.mark.parametrize("rice", range(8))
def test_message_with_any_rice_parameter_is_read(rice: int) -> None:
    answer, indices, _ = read(encode_as_text([3, ~200, 201], rice), 3, 202)
    assert answer == 0
    assert indices.tolist() == [3, 200, 201]


@pytest.mark.parametrize(
    ("payload", "count", "n_params", "reason"),
    [
        (b"", 1, 10, 1),
        (bytes([31, 0xFF]), 1, 10, 1),
        (bytes([0]), 1, 10, 2),
        (bytes([0, 0, 0]), 1, 10, 2),
        (bytes([8, 1]), 1, 1000, 2),  # a hit whose low bits are missing
        (encode_as_text([3], 1)[:-1], 1, 10, 2),
        (encode_as_text([10], 1), 1, 10, 3),
        (encode_as_text([10], 4), 1, 10, 3),
        (bytes([30, 0b100, 0, 0, 0, 0xFF, 0xFF, 0, 0]), 1, 10, 3),
        (encode_as_text([3], 1) + b"\0", 1, 10, 4),
        (encode_as_text([3, 4], 1), 1, 10, 4),
        (encode_as_text([3, 4], 1), 3, 10, 2),
    ],
)
def test_malformed_gaps_bytes_give_reason(
    payload: bytes, count: int, n_params: int, reason: int
) -> None:
    assert read(payload, count, n_params)[0] == reason
    assert gaps.REASONS[reason]


def test_rice_parameter_follows_the_density() -> None:
    assert [gaps.rice_guess(1, n) for n in (1, 10, 1000)] == [0, 2, 9]
    assert gaps.rice_guess(0, 2**31 - 1) == gaps.RICE_MAX


def test_best_rice_parameter_may_be_neighbour_of_guess() -> None:
    """The Rice parameter next to the guess is taken if its message is shorter."""
    clustered = np.arange(1000, dtype=np.int32)  # gaps of 0 in a wide model
    guess = gaps.rice_guess(clustered.size, 20_000)
    assert gaps.best_rice(clustered, guess) == guess - 1


@pytest.mark.parametrize("density", [1e-4, 1e-3, 1e-2, 0.3])
def test_gaps_message_exceeds_entropy_by_at_most_a_twentieth(density: float) -> None:
    n_params = 1_000_000
    random = np.random.default_rng(7)
    codes = np.flatnonzero(random.random(n_params) < density).astype(np.int32)
    p = codes.size / n_params
    positions = -n_params * (p * np.log2(p) + (1 - p) * np.log2(1 - p))
    assert 8 * len(message(codes.tolist(), n_params)) <= 1.05 * (positions + codes.size) + 16
