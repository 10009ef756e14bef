"""Memory on the host: arrays stay where they are, and only what is alike is assigned."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from sparkstrom.encoding import backends, samples
from sparkstrom.encoding.layers import Layers

memory = backends.memory()


def test_what_is_on_the_host_already_is_not_copied() -> None:
    array = np.arange(6, dtype=np.float32)
    assert memory.from_host(array) is array
    assert memory.to_host(array) is array
    assert memory.take(array, None) is array
    assert np.shares_memory(memory.part(array, slice(2, 4)), array)
    assert memory.take(array, np.array([5, 0])).tolist() == [5, 0]


def test_a_copy_is_another_array() -> None:
    array = np.arange(3, dtype=np.float32)
    twin = memory.copy(array)
    memory.assign(array, np.zeros(3, np.float32))
    assert (twin.tolist(), array.tolist()) == ([0, 1, 2], [0, 0, 0])


def test_a_difference_may_replace_one_of_its_terms() -> None:
    one, other = np.array([3, 5], np.float32), np.array([1, 7], np.float32)
    memory.subtract(other, one, other)
    assert other.tolist() == [2, -2]
    memory.subtract(one, one, other)
    assert one.tolist() == [1, 7]


@pytest.mark.parametrize("source", [np.zeros(1, np.float32), np.zeros(3, np.float64)])
def test_what_is_not_alike_is_not_assigned(source: NDArray[Any]) -> None:
    with pytest.raises(AssertionError):
        memory.assign(np.ones(3, np.float32), source)


def test_tau_is_taken_from_what_the_memory_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many parameters only a sample leaves their memory, and each counts by its layer."""
    asked: list[Any] = []

    class Gathering:  # all that is asked of a memory here
        def take(self, array: NDArray[Any], where: NDArray[Any]) -> NDArray[Any]:
            asked.append(where)
            return array[where]

    monkeypatch.setattr(samples, "SAMPLE_PARAMS", 8)
    learnt, theta = np.full(100, 6, np.float32), np.zeros(100, np.float32)
    layers = Layers((100,), (3,))
    tau = samples.tau_reached_by(0.5, 1, learnt, theta, -1, layers, memory=cast(Any, Gathering()))
    assert tau == 2
    assert [where.size for where in asked] == [8, 8]
    np.testing.assert_array_equal(*asked)
