"""Listeners for ``network.fit(..., listeners=[...])``; see docs/listeners.md."""

from sparkstrom.observe.listening.fit_events import (
    CheckpointWritten,
    EpochEnd,
    FitBegin,
    FitEnd,
    Iteration,
    TrainingListener,
    WorkerChange,
    WorkerSays,
)
from sparkstrom.observe.listening.given import (
    CollectScoresListener,
    EvaluativeListener,
    PerformanceListener,
    ScoreIterationListener,
    TimeIterationListener,
)
from sparkstrom.observe.listening.json_lines import JsonLines
from sparkstrom.observe.listening.tracking import MlflowListener, TensorBoardListener

__all__ = [
    "CheckpointWritten",
    "CollectScoresListener",
    "EpochEnd",
    "EvaluativeListener",
    "FitBegin",
    "FitEnd",
    "Iteration",
    "JsonLines",
    "MlflowListener",
    "PerformanceListener",
    "ScoreIterationListener",
    "TensorBoardListener",
    "TimeIterationListener",
    "TrainingListener",
    "WorkerChange",
    "WorkerSays",
]
