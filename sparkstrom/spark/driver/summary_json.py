"""Summary as JSON: in a checkpoint, for a fit that is done and not repeated."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from typing import Any

from sparkstrom.observe.epochs import Epoch
from sparkstrom.spark.driver.checkpoint_content import FitKey, Resumption
from sparkstrom.spark.driver.epoch_watch import Best
from sparkstrom.spark.driver.summary import TrainingSummary
from sparkstrom.spark.driver.summary_figures import Fault, WorkerFigures


def summary_to_json(summary: TrainingSummary) -> dict[str, Any]:
    """Every field; ``summary_of_json`` takes it back."""
    told = asdict(summary)
    told["staleness"] = {str(commits): count for commits, count in summary.staleness.items()}
    return told


def summary_of_json(told: dict[str, Any]) -> TrainingSummary:
    """As it was."""
    staleness = Counter({int(commits): count for commits, count in told["staleness"].items()})
    history = [Epoch(**epoch) for epoch in told["history"]]
    best = None if told["best"] is None else Best(**told["best"])
    records: dict[str, Any] = {
        "staleness": staleness,
        "history": history,
        "best": best,
        "per_worker": [WorkerFigures(**worker) for worker in told["per_worker"]],
        "faults": [Fault(**fault) for fault in told["faults"]],
    }
    return TrainingSummary(**(told | records))


def skipped(checkpoint: Resumption, key: FitKey) -> TrainingSummary:
    """Of a fit that a checkpoint has the result of; of a stream's, that of its last one."""
    summaries = checkpoint.summaries
    number = str(key.number) if str(key.number) in summaries else max(summaries, key=int)
    summary = summary_of_json(summaries[number])
    return replace(summary, resumed_from=checkpoint.path, checkpoint=checkpoint.path)
