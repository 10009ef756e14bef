"""Tests that nothing replaces a network's state during a fit, on Spark or on one machine."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from sparkstrom import SparkNetwork
from sparkstrom.base.errors import UsageError
from sparkstrom.local.parallel_wrapper import ParallelWrapper
from sparkstrom.models import DenseNetwork
from tests.unit.spark.test_column_settings import frame_with
from tests.unit.spark.test_fit_checkpoints import TwoSlots

ROWS = np.zeros((4, 2), np.float32), np.zeros(4, np.int64)


def make_spark_network(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a SparkNetwork that needs no Spark: preparing and partitioning are faked."""
    monkeypatch.setattr("sparkstrom.spark.network.make_application", lambda spark: TwoSlots())
    network = SparkNetwork(None, DenseNetwork([2, 2]), progress=False)
    monkeypatch.setattr(network, "_prepare", lambda slots, say: (2, []))
    monkeypatch.setattr(network, "_partition", lambda *args: SimpleNamespace(workers=2))
    monkeypatch.setattr(network, "_try_first_rows", lambda request, rows: None)
    return network


def make_parallel_wrapper(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a ParallelWrapper that needs no kernels."""
    return ParallelWrapper(DenseNetwork([2, 2]), 1, progress=False, training_mode="AVERAGING")


@pytest.mark.parametrize("make", [make_spark_network, make_parallel_wrapper])
def test_state_changes_are_refused_during_fit(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[Any], Any]
) -> None:
    """During a fit, other fits, rehearsals, ``restore`` and new parameters are refused."""
    with make(monkeypatch) as network:
        before, refused = network.parameters, list[str]()

        def train(*_: Any) -> Any:
            for change in (
                lambda: network.fit(ROWS),
                lambda: network.rehearse(ROWS, workers=[1], step="1ms"),
                lambda: network.restore("none"),
                lambda: setattr(network, "parameters", before + 1),
            ):
                with pytest.raises(UsageError) as error:
                    change()
                refused.append(str(error.value))
            return "summary"

        monkeypatch.setattr(network, "_train", train)
        assert cast(Any, network.fit(ROWS)) == "summary"
        (reason,) = set(refused)
        name = type(network).__name__
        assert f"a fit or rehearsal of this {name} is under way in another thread" in reason
        np.testing.assert_array_equal(network.parameters, before)
        network.parameters = before + 1  # the fit has ended


def test_fit_is_refused_during_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit that starts in a rehearsal, such as from a thread, is refused."""
    with make_parallel_wrapper(monkeypatch) as network:

        def simulate(*_: Any, **__: Any) -> str:
            with pytest.raises(UsageError, match="is under way in another thread"):
                network.fit(ROWS)
            return "rehearsed"

        monkeypatch.setattr("sparkstrom.local.parallel_wrapper.rehearse", simulate)
        assert network.rehearse(ROWS, workers=[1], step="1ms") == "rehearsed"


def test_close_is_refused_during_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """``close`` is refused until the fit has its result, because workers use the files."""
    network = make_spark_network(monkeypatch)
    closed = list[str]()
    monkeypatch.setattr(network._exports, "close", lambda: closed.append("exports"))

    def train(*_: Any) -> str:
        with pytest.raises(UsageError, match="a fit or rehearsal of this SparkNetwork"):
            network.close()
        with pytest.raises(KeyboardInterrupt), network:  # the block's own exception stays
            raise KeyboardInterrupt
        assert not closed
        network._state.is_final = True  # as when a listener's on_fit_end is called
        network.close()
        assert closed == ["exports"]
        return "summary"

    monkeypatch.setattr(network, "_train", train)
    network.fit(ROWS)
    network.close()
    assert len(closed) == 2


def test_columns_are_checked_before_a_fit_waits_for_executors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A misspelt column is an error at once, not after executors have been counted by a job."""
    network = make_spark_network(monkeypatch)
    monkeypatch.setattr(TwoSlots, "await_slots", lambda *_: pytest.fail("the fit waits"))
    frame = frame_with()
    frame.mapInArrow = None
    with pytest.raises(UsageError, match="there is no column 'pixels' for features"):
        network.fit(frame, features="pixels", label="Label")
    with pytest.raises(UsageError, match="weight='w': there are no columns in an RDD"):
        network.fit(ROWS, weight="w")
