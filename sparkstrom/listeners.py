"""Public import path for listeners, which a fit notifies of its progress, and for their events.

Pass listeners as ``network.fit(..., listeners=[...])``; see docs/listeners.md.
"""

from sparkstrom.observe.listener_events import (
    CheckpointWritten,
    EpochEnd,
    FitBegin,
    FitEnd,
    Iteration,
    JsonLines,
    TrainingListener,
    WorkerChange,
    WorkerSays,
)
from sparkstrom.observe.standard_listeners import (
    CollectScoresListener,
    EvaluativeListener,
    MlflowListener,
    PerformanceListener,
    ScoreIterationListener,
    TensorBoardListener,
    TimeIterationListener,
)

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
