"""Tests of optimizer states as bytes: round trips, and refusal of other or executable content."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import pytest

from sparkstrom.base.errors import UsageError, WireError
from sparkstrom.codec.optimizer_state_codec import decode_state_untrusted, encode_state
from sparkstrom.models import Adam, DenseNetwork
from sparkstrom.models.base import Batch


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"steps": 3, "rate": 0.1, "big": 2**60},
        {"file": np.zeros((2, 3), np.float32), "scalars": 1, "0.weight/exp_avg": np.arange(3)},
        {"empty": np.empty(0, np.float32), "one": np.array(2.5)},
    ],
)
def test_optimizer_state_round_trip(state: dict[str, Any]) -> None:
    back = decode_state_untrusted(encode_state(state))
    assert set(back) == set(state)
    for name, value in state.items():
        np.testing.assert_array_equal(back[name], value)
        assert np.asarray(back[name]).dtype == np.asarray(value).dtype
        assert isinstance(back[name], np.ndarray) is isinstance(value, np.ndarray)


def test_numpy_scalars_are_decoded_as_python_numbers() -> None:
    """NumPy scalars are decoded as Python's numbers."""
    sent: Any = {"steps": np.int64(3), "rate": np.float32(0.5), "warm": np.bool_(True)}
    back = decode_state_untrusted(encode_state(sent))
    assert back == {"steps": 3, "rate": 0.5, "warm": True}
    assert [type(value) for value in back.values()] == [int, float, bool]


def test_state_value_of_unsupported_type_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="contains 'seen', a set, which cannot be saved or sent"):
        encode_state({"steps": 3, "seen": {1}})  # type: ignore[dict-item]


def test_optimizer_continues_exactly_from_decoded_state() -> None:
    """An optimizer continues from an encoded state exactly as without the round trip."""
    batch = Batch(np.ones((4, 2), np.float32), np.zeros(4, np.int64))
    first, second = (DenseNetwork([2, 3, 2], updater=Adam(), seed=1) for _ in range(2))
    for model in (first, second):
        model.bind(model.initial())
        model.step(batch)
    after = first._require_bound().copy()
    first.step(batch)
    third = DenseNetwork([2, 3, 2], updater=Adam(), seed=1)
    third.bind(after)
    third.load_updater_state(decode_state_untrusted(encode_state(second.updater_state())))
    third.step(batch)
    np.testing.assert_array_equal(third._require_bound(), first._require_bound())


def pickled() -> bytes:
    """Return an archive with a pickled array."""
    file = io.BytesIO()
    np.savez(file, scalars=np.array("{}"), **{"/x": np.array([print], object)})  # type: ignore[arg-type]
    return file.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no file",
        encode_state({"x": np.zeros(9)})[:-30],
        pickle.dumps({"x": 1}),
        pickled(),
    ],
    ids=["empty", "text", "cut", "pickle", "pickled array"],
)
def test_malformed_or_pickled_state_is_refused(content: bytes) -> None:
    with pytest.raises(WireError, match="an updater's state that cannot be read"):
        decode_state_untrusted(content)
