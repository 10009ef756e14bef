"""Micro-batches: each is a fit of one network, which goes on where the last one ended."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from sparkstrom.base.errors import UsageError
from sparkstrom.spark.driver.network import SparkNetwork
from sparkstrom.spark.driver.summary import TrainingSummary

OnSummary = Callable[[int, TrainingSummary], object]


def each_batch(
    network: SparkNetwork, on_summary: OnSummary | None = None, **fit: Any
) -> Callable[[Any, int], None]:
    """What ``foreachBatch`` calls: ``network.fit(frame, **fit)`` for each micro-batch with rows.

    ``on_summary(batch_id, summary)`` hears of each fit. A micro-batch without rows is no fit. What
    a fit raises ends the query with it. Raises UsageError where ``fit`` names no option of ``fit``.
    """
    if not isinstance(network, SparkNetwork):
        raise UsageError(f"network={network!r}: must be a SparkNetwork, made before the query")
    network.application.need_rdds("each_batch(network)", "fit tables in a loop of your own")
    if on_summary is not None and not callable(on_summary):
        raise UsageError(f"on_summary={on_summary!r}: must be called with batch id and summary")
    if "data" in fit:
        raise UsageError("data=...: each micro-batch is the data; leave it out")
    unknown = sorted(set(fit) - set(_options()))
    if unknown:
        raise UsageError(
            f"{unknown[0]}={fit[unknown[0]]!r}: fit has no such option; it has {_options()}"
        )

    def fit_batch(frame: Any, batch: int) -> None:
        if frame.isEmpty():
            return
        summary = network.fit(frame, **fit)
        if on_summary is not None:
            on_summary(batch, summary)

    return fit_batch


def _options() -> list[str]:
    """Of ``fit``, besides the data."""
    return list(inspect.signature(SparkNetwork.fit).parameters)[2:]
