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
from tests.unit.spark.test_fit_checkpoints import TwoSlots

ROWS = np.zeros((4, 2), np.float32), np.zeros(4, np.int64)


def network_on_spark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a SparkNetwork that needs no Spark: preparing and partitioning are faked."""
    monkeypatch.setattr("sparkstrom.spark.network.make_application", lambda spark: TwoSlots())
    network = SparkNetwork(None, DenseNetwork([2, 2]), progress=False)
    monkeypatch.setattr(network, "_prepare", lambda slots, say: (2, []))
    monkeypatch.setattr(network, "_partition", lambda *args: SimpleNamespace(workers=2))
    monkeypatch.setattr(network, "_try_first_rows", lambda request, rows: None)
    return network


def wrapper_of_one_process(monkeypatch: pytest.MonkeyPatch) -> Any:
    return ParallelWrapper(DenseNetwork([2, 2]), 1, progress=False, training_mode="AVERAGING")


@pytest.mark.parametrize("make", [network_on_spark, wrapper_of_one_process])
def test_nothing_replaces_the_state_of_a_network_that_trains(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[Any], Any]
) -> None:
    """During a fit, other fits, ``restore`` and new parameters are refused, until it has ended."""
    with make(monkeypatch) as network:
        before, refused = network.parameters, list[str]()

        def train(*_: Any) -> Any:
            for change in (
                lambda: network.fit(ROWS),
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
        assert f"a fit of this {type(network).__name__} is under way in another thread" in reason
        np.testing.assert_array_equal(network.parameters, before)
        network.parameters = before + 1  # the fit has ended
