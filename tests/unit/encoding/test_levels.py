"""Tests of levels against a definition that writes bits as text, of malformed bytes, of size."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.encode import entropy_bits
from sparkstrom.encoding import gaps
from sparkstrom.encoding import leveled_gaps as levels

I32 = NDArray[np.int32]


def message(codes: I32, of: list[int], n_params: int) -> bytes:
    """Encode codes with their levels ``of``."""
    top = max(of)
    out = np.full(levels.bytes_max(codes.size, n_params, top) + gaps.FLUSH_BYTES, 255, np.uint8)
    size = levels.encode(codes, np.array(of, np.uint8), top, n_params, out)
    assert size <= levels.bytes_max(codes.size, n_params, top)
    return out[:size].tobytes()


def section(of: list[int], level: int, rice: int) -> bytes:
    """Return which entries have at least this level, as a string of bits, the lowest bit first."""
    flags = [one >= level for one in of if one >= level - 1]
    bits, gap = "", 0
    for member in [*flags, True]:
        if member:
            low = format(gap % 2**rice, f"0{rice}b")[::-1] if rice else ""
            bits, gap = bits + "0" * (gap >> rice) + "1" + low, 0
        else:
            gap += 1
    bits += "0" * (-len(bits) % 8)
    return bytes([rice]) + bytes(int(bits[i : i + 8][::-1], 2) for i in range(0, len(bits), 8))


def read(payload: bytes, count: int, n_params: int) -> tuple[str, list[int], list[int]]:
    """Return the reason (empty if there is none), the indices and the amounts."""
    indices, amounts = np.zeros(count, np.int32), np.zeros(count, np.int32)
    reason = levels.read(np.frombuffer(payload, np.uint8), n_params, 6, indices, amounts)
    return reason, indices.tolist(), amounts.tolist()


CODES = np.array([3, ~10, 11, 500, ~999], np.int32)
CASES = [[0, 0, 1, 0, 0], [3, 3, 3, 3, 3], [0, 2, 0, 3, 1], [1, 0, 0, 0, 0]]


@pytest.mark.parametrize("of", CASES)
def test_levels_message_has_documented_layout_and_round_trips(of: list[int]) -> None:
    payload = message(CODES, of, 1000)
    at, said = 1, bytes([max(of)])
    for level in range(1, max(of) + 1):
        part = section(of, level, payload[at])
        said, at = said + part, at + len(part)
    hits = np.zeros(100, np.uint8)
    assert payload == said + hits[: gaps.encode(CODES, 1000, hits)].tobytes()
    reason, indices, amounts = read(payload, 5, 1000)
    assert (reason, indices) == ("", [3, 10, 11, 500, 999])
    signs = [1, -1, 1, 1, -1]
    assert amounts == [6 * sign * 2**one for sign, one in zip(signs, of, strict=True)]


@pytest.mark.parametrize("rice", range(6))
def test_levels_with_any_rice_parameter_are_read(rice: int) -> None:
    of = [0, 1, 0, 0, 1]
    plain = message(CODES, of, 1000)
    hits = plain[1 + len(section(of, 1, plain[1])) :]
    assert read(bytes([1]) + section(of, 1, rice) + hits, 5, 1000)[2] == [6, -12, 6, 6, -12]


GOOD = message(CODES, [0, 1, 0, 0, 1], 1000)
SECTION = len(section([0, 1, 0, 0, 1], 1, GOOD[1]))


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "highest level"),
        (b"\0" + GOOD[1:], "highest level"),
        (b"\4" + GOOD[1:], "highest level"),
        (b"\1", "levels do not fit"),
        (b"\1\37" + GOOD[2:], "levels do not fit"),
        (b"\1" + section([0, 1, 0, 1], 1, 0) + GOOD[1 + SECTION :], "levels do not fit"),
        (b"\1" + section([0, 1, 0, 0, 0, 1], 1, 0) + GOOD[1 + SECTION :], "levels do not fit"),
        (GOOD[:2] + bytes([GOOD[2] | 128]) + GOOD[3:], "levels do not fit"),  # padding
        (b"\1\0\0\0\0\0\0\0\0\0", "levels do not fit"),
        (GOOD[: 1 + SECTION], "out of range"),
        (GOOD[:-1], "few bytes"),
        (GOOD + b"\0", "left over"),
    ],
)
def test_malformed_levels_bytes_give_reason(payload: bytes, reason: str) -> None:
    assert reason in read(payload, 5, 1000)[0]


@pytest.mark.parametrize("tail", ["normal", "laplace", "cauchy"])
@pytest.mark.parametrize("density", [1e-3, 1e-2, 0.25])
def test_levels_message_exceeds_entropy_by_at_most_a_twentieth(tail: str, density: float) -> None:
    random = np.random.default_rng(7)
    residual = getattr(random, {"cauchy": "standard_cauchy"}.get(tail, tail))(size=500_000)
    sizes = np.abs(residual)
    tau = np.quantile(sizes, 1 - density)
    where = np.flatnonzero(sizes >= tau).astype(np.int32)
    codes = np.where(residual[where] < 0, ~where, where)
    of = np.clip(np.log2(sizes[where] / tau), 0, levels.TOP_MAX).astype(np.uint8)
    bits = 8 * len(message(codes, [*of[:-1].tolist(), 1], residual.size))
    assert bits <= 1.05 * entropy_bits(codes, of, residual.size) + 64
