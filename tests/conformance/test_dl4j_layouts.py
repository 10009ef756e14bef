"""Tests of DL4J's int32 layouts: ND4J's own answers bit for bit, its tests' examples, edges."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from sparkstrom.base.errors import UsageError, WireError
from sparkstrom.codec.dl4j import (
    decode_bitmap,
    decode_threshold,
    encode_bitmap,
    encode_threshold,
)

VECTORS = Path(__file__).parent / "data/dl4j-vectors.npz"
HALF_BITS = 1056964608  # 0.5 as float32
THOUSANDTH_BITS = 981668463  # 1e-3 as float32

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]


class Case(NamedTuple):
    """One recorded call of an ND4J encoder."""

    kind: str
    tau: float
    limit: int | None
    values: F32
    message: I32
    residual: F32
    decoded: F32


def cases() -> list[Case]:
    """Return all recorded calls."""
    with np.load(VECTORS) as archive:
        data = {name: archive[name] for name in archive.files}
    parts = ("values", "message", "residual", "decoded")
    cut = {name: np.split(data[name], data[f"{name}_at"][1:-1]) for name in parts}
    return [
        Case(
            str(data["kind"][i]),
            float(data["tau"][i]),
            None if data["limit"][i] < 0 else int(data["limit"][i]),
            *(cut[name][i] for name in parts),
        )
        for i in range(len(data["kind"]))
    ]


def f32(*values: float) -> F32:
    return np.array(values, np.float32)


def encode(case: Case, values: F32) -> I32 | None:
    if case.kind == "threshold":
        return encode_threshold(values, case.tau, case.limit)
    return encode_bitmap(values, case.tau)


@pytest.mark.parametrize("case", cases(), ids=lambda c: f"{c.kind}-{c.values.size}-{c.tau}")
def test_messages_and_residuals_equal_recorded_ones_of_nd4j(case: Case) -> None:
    """Message, residual and decoded values equal ND4J's recorded ones bit for bit."""
    values = case.values.copy()
    message = encode(case, values)
    assert (message is None) == (case.message.size == 0)
    assert values.tobytes() == case.residual.tobytes()
    out = np.zeros_like(values)
    if message is not None:
        assert message.dtype == np.int32
        assert message.tolist() == case.message.tolist()
        (decode_threshold if case.kind == "threshold" else decode_bitmap)(message, out)
    assert out.tobytes() == case.decoded.tobytes()


def test_recorded_vectors_are_complete() -> None:
    assert len(cases()) == 112


@pytest.mark.parametrize(
    ("values", "tau", "limit", "message", "residual"),
    [
        (f32(1.5, 2.5, -3.5), 0.5, None, [3, 3, HALF_BITS, 0, 1, 2, -3], f32(1, 2, -3)),
        (
            f32(0.5, 0.1, -0.5, 0.49999, -0.6, 2.0),
            0.5,
            None,
            [4, 6, HALF_BITS, 0, 1, -3, -5, 6],
            f32(0, 0.1, 0, 0.49999, np.float32(-0.6) + np.float32(0.5), 1.5),
        ),
        (f32(1, 1, 1, 1, 1, 1), 0.5, 3, [3, 6, HALF_BITS, 0, 1, 2, 3], f32(0.5, 0.5, 0.5, 1, 1, 1)),
        (f32(np.inf, -np.inf), 0.5, None, [2, 2, HALF_BITS, 0, 1, -2], f32(np.inf, -np.inf)),
        (f32(1, np.nan, 1), 0.5, None, [2, 3, HALF_BITS, 0, 1, 3], f32(0.5, np.nan, 0.5)),
    ],
)
def test_threshold_encoding_matches_examples(
    values: F32, tau: float, limit: int | None, message: list[int], residual: F32
) -> None:
    made = encode_threshold(values, tau, limit)
    assert made is not None
    assert made.tolist() == message
    np.testing.assert_array_equal(values, residual)


@pytest.mark.parametrize(
    ("values", "limit"),
    [
        (f32(), None),
        (f32(0.9, 0.1, -0.2, 0), None),  # one hit is never sent
        (f32(1, 1, 1), 1),
        (f32(1, 1, 1), 0),
        (f32(-0.0, 0.0, np.nan, 0.49999997), None),
    ],
)
def test_fewer_than_two_entries_give_no_message(values: F32, limit: int | None) -> None:
    before = values.tobytes()
    assert encode_threshold(values, 0.5, limit) is None
    assert values.tobytes() == before


@pytest.mark.parametrize(
    ("values", "words", "residual"),
    [
        (f32(0, -6e-4, 1e-3, -1e-3, 0, 0), [655372], f32(0, -1e-4, 0, 0, 0, 0)),
        (f32(0, 0, 1e-3, -1e-3, 0, 0), [1 << 3 + 16 | 0b1100], f32(0, 0, 0, 0, 0, 0)),
        (f32(6e-4, 5e-4), [0], f32(6e-4, 5e-4)),  # no half step upwards
        (f32(-5e-4), [1 << 16], f32(0)),  # the bound is included
        (f32(-0.0, np.nan), [0], f32(-0.0, np.nan)),
        (f32(), [0], f32()),
        (f32(*[-1] * 16), [-1, 0], f32(*[np.float32(-1) + np.float32(1e-3)] * 16)),
    ],
)
def test_bitmap_encoding_matches_examples(values: F32, words: list[int], residual: F32) -> None:
    size = values.size
    assert encode_bitmap(values, 1e-3).tolist() == [size, size, THOUSANDTH_BITS, 1, *words]
    np.testing.assert_allclose(values, residual, rtol=0, atol=1e-11)
    assert np.signbit(values).tolist() == np.signbit(residual).tolist()


@pytest.mark.parametrize(("size", "words"), [(0, 5), (15, 5), (16, 6), (31, 6), (32, 7), (33, 7)])
def test_bitmap_length_follows_number_of_values(size: int, words: int) -> None:
    assert encode_bitmap(np.zeros(size, np.float32), 1.0).size == words


@pytest.mark.parametrize("tau", [1e30, 1e-45, 3.4028234e38])
def test_extreme_taus_are_encoded_exactly(tau: float) -> None:
    values = f32(tau, -tau, 0.0, -0.0)
    message = encode_threshold(values, tau)
    assert message is not None
    assert message[4:].tolist() == [1, -2]
    assert not values.any()
    out = np.zeros(4, np.float32)
    decode_threshold(message, out)
    assert out.tolist() == [np.float32(tau), -np.float32(tau), 0, 0]


def test_decoding_adds_to_array_and_keeps_other_entries() -> None:
    """Decoding adds to the array, and leaves other entries as they are, even -0."""
    out = f32(-0.0, 1.0, -0.0)
    message = np.array([2, 3, HALF_BITS, 0, 3, -2], np.int32)
    decode_threshold(message, out)
    decode_threshold(message, out)
    assert out.tolist() == [0, 0, 1]
    assert np.signbit(out).tolist() == [True, False, False]
    bitmap = encode_bitmap(f32(1.0, -0.25, 0), 0.5)
    out = f32(-0.0, 0, -0.0)
    decode_bitmap(bitmap, out)
    assert out.tolist() == [0.5, -0.25, 0]
    assert np.signbit(out[2])


numbers = st.floats(-4, 4, width=16)


@given(values=arrays(np.float32, st.integers(0, 70), elements=numbers), exponent=st.integers(-3, 1))
def test_decoded_plus_residual_equals_input(values: F32, exponent: int) -> None:
    tau = 2.0**exponent
    for codec in ((encode_threshold, decode_threshold), (encode_bitmap, decode_bitmap)):
        rest, out = values.copy(), np.zeros_like(values)
        message = codec[0](rest, tau)
        if message is not None:
            codec[1](message, out)
        np.testing.assert_array_equal(out.astype(np.float64) + rest, values)


def threshold_message() -> I32:
    return np.array([2, 20, HALF_BITS, 0, 3, -20], np.int32)


def bitmap_message() -> I32:
    return np.array([20, 20, HALF_BITS, 1, 0b1001, 1 << 17], np.int32)


def replace_word(message: I32, word: int, value: int) -> I32:
    message[word] = value
    return message


NAN_BITS, INFINITY_BITS = 0x7FC00000, 0x7F800000

MALFORMED_THRESHOLDS = [
    replace_word(threshold_message(), 0, 1),  # fewer than the message has
    replace_word(threshold_message(), 0, 3),
    replace_word(threshold_message(), 0, -2),
    replace_word(threshold_message(), 1, 19),
    replace_word(threshold_message(), 1, 21),
    replace_word(threshold_message(), 2, NAN_BITS),
    replace_word(threshold_message(), 2, INFINITY_BITS),
    replace_word(threshold_message(), 2, 0),
    replace_word(threshold_message(), 2, -1090519040),  # -0.5
    replace_word(threshold_message(), 3, 1),
    replace_word(threshold_message(), 3, -1),
    replace_word(threshold_message(), 5, 0),
    replace_word(threshold_message(), 5, 21),
    replace_word(threshold_message(), 5, -21),
    replace_word(threshold_message(), 5, -(2**31)),
    replace_word(threshold_message(), 5, -3),  # the same value again
    threshold_message()[:5],
    threshold_message()[:3],
    threshold_message()[:0],
    np.append(threshold_message(), np.int32(4)),
    threshold_message().astype(np.int64),
    threshold_message().reshape(2, 3),
    threshold_message().tolist(),
    threshold_message().tobytes(),
    None,
]
MALFORMED_BITMAPS = [
    replace_word(bitmap_message(), 0, 19),
    replace_word(bitmap_message(), 1, 19),
    replace_word(bitmap_message(), 2, NAN_BITS),
    replace_word(bitmap_message(), 3, 0),
    replace_word(bitmap_message(), 3, 2),
    replace_word(bitmap_message(), 5, 1 << 4),  # value 20, there are 0 to 19
    replace_word(bitmap_message(), 5, 1 << 4 + 16),
    replace_word(bitmap_message(), 5, -(2**31)),
    bitmap_message()[:5],
    bitmap_message()[:4],
    np.append(bitmap_message(), np.int32(0)),
    bitmap_message().astype(np.uint32),
    None,
]


@pytest.mark.parametrize("message", MALFORMED_THRESHOLDS)
def test_a_malformed_threshold_message_changes_nothing(message: Any) -> None:
    out = np.ones(20, np.float32)
    with pytest.raises(WireError):
        decode_threshold(message, out)
    assert out.tolist() == [1] * 20


@pytest.mark.parametrize("message", MALFORMED_BITMAPS)
def test_a_malformed_bitmap_changes_nothing(message: Any) -> None:
    out = np.ones(20, np.float32)
    with pytest.raises(WireError):
        decode_bitmap(message, out)
    assert out.tolist() == [1] * 20


def test_message_in_strided_view_is_decoded() -> None:
    """A message in a strided view is decoded like a contiguous one."""
    out, again = np.zeros(20, np.float32), np.zeros(20, np.float32)
    decode_bitmap(bitmap_message(), out)
    decode_bitmap(np.repeat(bitmap_message(), 2)[::2], again)
    assert out[[0, 3, 17]].tolist() == [0.5, 0.5, -0.25]
    assert np.count_nonzero(out) == 3
    np.testing.assert_array_equal(out, again)


def make_read_only_array() -> F32:
    values = np.ones(4, np.float32)
    values.flags.writeable = False
    return values


@pytest.mark.parametrize(
    "values",
    [
        np.ones(4),
        np.ones(4, ">f4"),
        np.ones(8, np.float32)[::2],
        np.ones((2, 2), np.float32),
        make_read_only_array(),
        [1.0, 1.0],
        None,
    ],
)
def test_an_array_that_cannot_be_changed_in_place_is_refused(values: Any) -> None:
    for call in (
        lambda: encode_threshold(values, 0.5),
        lambda: encode_bitmap(values, 0.5),
        lambda: decode_threshold(threshold_message(), values),
        lambda: decode_bitmap(bitmap_message(), values),
    ):
        with pytest.raises(UsageError, match="contiguous, one-dimensional float32"):
            call()


@pytest.mark.parametrize(
    "tau", [0.0, -0.5, np.nan, np.inf, 1e39, 10**400, 1e-50, "0.5", None, True, f32(0.5)]
)
def test_invalid_tau_is_refused(tau: Any) -> None:
    """A tau that is not a positive, finite float32 is refused."""
    for encoder in (encode_threshold, encode_bitmap):
        with pytest.raises(UsageError, match="tau="):
            encoder(np.ones(4, np.float32), tau)


@pytest.mark.parametrize("limit", [-1, 2.0, "3"])
def test_invalid_limit_is_refused(limit: Any) -> None:
    with pytest.raises(UsageError, match="limit="):
        encode_threshold(np.ones(4, np.float32), 0.5, limit)
