"""Tests of each_batch: arguments that it refuses, and micro-batches without rows."""

from __future__ import annotations

from typing import Any

import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.spark.network import SparkNetwork
from sparkstrom.streams import each_batch


class Application:
    """A fake application that supports streams."""

    def require_rdds(self, what: str, instead: str) -> None: ...


NETWORK = object.__new__(SparkNetwork)
NETWORK._application = Application()  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("network", "options", "says"),
    [
        ("model", {}, "network='model'"),
        (NETWORK, {"epoch": 3}, "epoch=3: fit has no such option.*'epochs'"),
        (NETWORK, {"data": 1}, "leave it out"),
        (NETWORK, {"on_summary": 3}, "on_summary=3"),
    ],
)
def test_misuse_is_refused_at_once(network: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        each_batch(network, **options)


class Frame:
    """A fake micro-batch with this number of rows."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def isEmpty(self) -> bool:
        return not self.rows


def test_a_micro_batch_without_rows_is_no_fit(monkeypatch: pytest.MonkeyPatch) -> None:
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
