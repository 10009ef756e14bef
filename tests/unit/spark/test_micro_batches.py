"""Tests of each_batch: arguments that it refuses, and micro-batches without rows."""

from __future__ import annotations

from typing import Any

import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.fit.checkpoints import BATCH_PROPERTY, STREAM_PROPERTY, make_fit_key
from sparkstrom.fit.network_state import NetworkStateHolder
from sparkstrom.models import DenseNetwork
from sparkstrom.spark.network import RUN_PROPERTY, SparkNetwork
from sparkstrom.streams import each_batch


class Application:
    """A fake application that supports streams."""

    batch = -1  # id of the micro-batch; -1 outside of a stream
    run = 1  # number of the query's run

    def require_rdds(self, what: str, instead: str) -> None: ...

    def get_local_property(self, key: str) -> str | None:
        values = {
            STREAM_PROPERTY: "query 1",
            BATCH_PROPERTY: str(self.batch),
            RUN_PROPERTY: f"run {self.run}",
        }
        return values[key] if self.batch >= 0 else None


def make_network() -> Any:
    """Return a network with a fake application; its ``fit`` is to be replaced."""
    network: Any = object.__new__(SparkNetwork)
    network._application, network._state = Application(), NetworkStateHolder(DenseNetwork([2, 2]))
    return network


NETWORK = make_network()


@pytest.mark.parametrize(
    ("network", "options", "says"),
    [
        ("model", {}, "network='model'"),
        (NETWORK, {"epoch": 3}, "epoch=3: fit has no such option.*'epochs'"),
        (NETWORK, {"data": 1}, "leave it out"),
        (NETWORK, {"on_summary": 3}, "on_summary=3"),
    ],
)
def test_each_batch_rejects_wrong_arguments_at_once(
    network: Any, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        each_batch(network, **options)


class Frame:
    """A fake micro-batch with this number of rows."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def isEmpty(self) -> bool:
        return not self.rows


def test_empty_micro_batch_starts_no_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither ``fit`` nor the callback is called for a micro-batch without rows."""
    fits, heard = [], []
    monkeypatch.setattr(
        SparkNetwork, "fit", lambda self, data, epochs=1: fits.append((data.rows, epochs)) or "done"
    )
    call = each_batch(NETWORK, lambda *words: heard.append(words), epochs=2)
    for batch, rows in enumerate((3, 0, 5)):
        call(Frame(rows), batch)
    assert fits == [(3, 2), (5, 2)]
    assert heard == [(0, "done"), (2, "done")]


def test_repeated_micro_batch_is_trained_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a query that ended in the callback is started again, Spark repeats the micro-batch.

    Before, its rows were trained twice. It is trained again only if the parameters that contain it
    were replaced.
    """
    network, fits, heard = make_network(), list[int](), list[tuple[int, str]]()

    def fit(self: Any, data: Any) -> str:
        fits.append(data.rows)
        return f"fit {len(fits)}"

    monkeypatch.setattr(SparkNetwork, "fit", fit)

    def give(batch: int, run: int) -> None:
        network._application.batch, network._application.run = batch, run
        each_batch(network, lambda *words: heard.append(words))(Frame(10 + batch), batch)

    for batch, run in ((0, 1), (1, 1), (1, 2), (2, 2)):
        give(batch, run)
    assert fits == [10, 11, 12]
    assert heard == [(0, "fit 1"), (1, "fit 2"), (1, "fit 2"), (2, "fit 3")]
    network._state.assign(network._state.parameters)
    give(2, 3)
    assert fits == [10, 11, 12, 12]


def test_two_calls_for_one_micro_batch_both_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function may call the trainer twice with one micro-batch, which Spark does not repeat."""
    network, fits = make_network(), list[int]()
    monkeypatch.setattr(SparkNetwork, "fit", lambda self, data: fits.append(data.rows) or "done")
    network._application.batch = 0
    train = each_batch(network)
    train(Frame(3), 0)
    train(Frame(4), 0)
    assert fits == [3, 4]


def test_micro_batch_fitted_while_rows_are_counted_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fit of a stopped query may end after the restarted one has begun with its rows."""
    network = make_network()
    monkeypatch.setattr(SparkNetwork, "fit", lambda self, data: pytest.fail("trained twice"))
    application = network._application
    application.batch, application.run = 5, 2

    class SlowFrame(Frame):
        def isEmpty(self) -> bool:
            key = make_fit_key(0, application.get_local_property)
            network._state.record_micro_batch(key, "run 1", "the earlier fit")
            return False

    heard: list[Any] = []
    each_batch(network, lambda *words: heard.append(words))(SlowFrame(3), 5)
    assert heard == [(5, "the earlier fit")]
