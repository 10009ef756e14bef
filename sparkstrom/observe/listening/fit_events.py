"""What a listener hears of a fit: plain values, in the order in which things happened.

DL4J: ``TrainingListener`` and ``IterationListener``. There a listener runs inside a worker; here
on the driver, beside the training, and hears of all workers together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sparkstrom.observe.progress import Line


@dataclass(frozen=True, slots=True)
class FitBegin:
    """All is checked; workers are about to start."""

    model: str  # its class
    n_params: int
    workers: int  # wanted
    epochs: int  # of this fit
    first_epoch: int  # epochs of earlier fits
    options: dict[str, Any]  # of the SharedTrainingMaster, JSON-able
    resumed_from: str | None = None  # the checkpoint that it goes on from


@dataclass(frozen=True, slots=True)
class Iteration:
    """More minibatches are committed than at the last look; looks are a tenth of a second apart.

    With k workers many are committed between two looks: this says how far all are by now.
    """

    minibatches: int  # committed in this fit
    minibatches_expected: int
    epoch: float  # of this fit, mean over partitions
    loss: float | None  # mean over each worker's last epoch; None: nobody has trained yet
    examples: int  # trained
    seconds: float  # since the fit began
    updates: int  # committed
    bytes_sent: int  # sealed updates
    sent_fraction: float | None  # entries per parameter and publication
    tau: float | None  # the workers' mean threshold
    staleness: float  # of the fit's minibatches: how many an update had not seen, mean
    waiting: float  # in residuals, of the fit's minibatches, mean
    workers: int  # alive
    workers_wanted: int
    bytes_wire: int = 0  # that left interfaces, all headers included
    bytes_by_kind: dict[str, int] = field(default_factory=dict)  # handed over to be sent, each hop
    slow_links: tuple[str, ...] = ()  # found too slow so far, in words


@dataclass(frozen=True, slots=True)
class WorkerChange:
    """Workers have come or gone. A partition whose worker was replaced at once is in both."""

    joined: frozenset[int]  # partitions that have another worker than before
    left: frozenset[int]  # whose worker is gone
    training: frozenset[int]  # that have one now
    seconds: float
    reasons: tuple[str, ...] = ()  # of those that left, with partition and host


@dataclass(frozen=True, slots=True)
class WorkerSays:
    """A worker's code printed a line, warned or logged. Bounded; without control characters."""

    partition: int
    host: str
    phase: str  # what the worker was doing, in words
    text: str
    seconds: float


@dataclass(frozen=True, slots=True)
class EpochEnd:
    """All partitions have come to the end of an epoch."""

    epoch: int  # from 1 over all fits of a network
    loss: float  # mean over examples, each under the parameters before its own step
    validation: float | None  # loss or accuracy of the rows held out; None: none are
    examples: int
    seconds: float
    copy: Callable[[], Any] = field(repr=False, compare=False)
    judge: Callable[..., Any] = field(repr=False, compare=False)

    def snapshot(self) -> Any:
        """The driver's replica as of now: ``commit``, ``parameters`` f32[n_params], ``buffers``.

        It is copied when it is asked for, so what is not asked for costs nothing.
        """
        return self.copy()

    def evaluate(self, features: Any, labels: Any, metrics: Any = None) -> Any:
        """``network.evaluate`` of two arrays under such a copy, in this thread."""
        return self.judge(features, labels, metrics)


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    """A checkpoint is whole in its directory."""

    path: str
    epochs: float  # all partitions are through so many
    write_seconds: float
    seconds: float = 0.0  # since the fit began


@dataclass(frozen=True, slots=True)
class FitEnd:
    """It is over, and nothing of it runs any more."""

    summary: Any  # TrainingSummary; None where it failed
    error: str | None  # why, in one line
    seconds: float


Event = FitBegin | Iteration | WorkerChange | WorkerSays | EpochEnd | CheckpointWritten | FitEnd


class TrainingListener:
    """A listener with nothing to say; a plain object with any of these methods is one, too.

    ``fails_fit``: what one of them raises ends the fit, by the listener's name; otherwise it is
    told once, and that listener hears nothing more.
    """

    fails_fit = True

    def on_fit_begin(self, event: FitBegin) -> None:
        """Before the first worker starts."""

    def on_iteration(self, event: Iteration) -> None:
        """Training went on."""

    def on_worker_change(self, event: WorkerChange) -> None:
        """Somebody came or went."""

    def on_worker_says(self, event: WorkerSays) -> None:
        """A worker's code printed, warned or logged."""

    def on_epoch(self, event: EpochEnd) -> None:
        """An epoch is complete."""

    def on_checkpoint(self, event: CheckpointWritten) -> None:
        """A checkpoint was written."""

    def on_fit_end(self, event: FitEnd) -> None:
        """The last that is heard, also of a fit that failed."""


def iteration_of(line: Line, seconds: float, minibatches: tuple[int, int]) -> Iteration:
    """What the progress line knows, as an event; ``minibatches``: committed, expected."""
    return Iteration(
        minibatches=minibatches[0],
        minibatches_expected=minibatches[1],
        epoch=line.epoch,
        loss=line.loss,
        examples=line.examples,
        seconds=seconds,
        updates=line.updates,
        bytes_sent=line.bytes_sent,
        sent_fraction=line.sent_fraction,
        tau=line.tau,
        staleness=line.staleness,
        waiting=line.waiting,
        workers=line.workers,
        workers_wanted=line.partitions,
    )
