"""Checkpoint content: what of a fit is saved, and what a later fit goes on from."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import (
    CheckpointDamaged,
    SparkstromError,
    UsageError,
    first_line,
)
from sparkstrom.base.identity import Position
from sparkstrom.checkpoint.checkpoint_file import Checkpoint
from sparkstrom.checkpoint.store import check_same
from sparkstrom.models.base import Buffered, Flat, FlatModel
from sparkstrom.observe.epochs import EpochBook
from sparkstrom.protocol.common.fit_spec import FitSpec, PartitionStart
from sparkstrom.runtime.fit_state import Snapshot
from sparkstrom.runtime.lent_state import LentStates, updater_in
from sparkstrom.spark.driver.epoch_watch import Best
from sparkstrom.spark.driver.training_master import ALL, ONE

Figures = dict[str, Any]  # of epochs, as ``observe.epochs.EpochBook.report`` has them
EARLIER_RUN = -1  # the commit of a copy that no commit of this run stands for


@dataclass(frozen=True, slots=True)
class FitKey:
    """Which of a program's fits: the same command gives the same keys when it is run again."""

    number: int  # of the network's fits, from 1
    stream: str = ""  # id of a streaming query
    batch: int = -1  # its micro-batch


@dataclass(frozen=True, slots=True)
class FitToSave:
    """A fit that is to be saved, as it is now."""

    key: FitKey
    spec: FitSpec
    threshold: str  # the algorithm, in words: encoders' states belong to it
    snapshot: Snapshot  # what is delivered, and how far each partition is
    figures: Figures
    k: int  # of the grid
    states: LentStates  # of workers; b"": none could be had
    wanted: str = ONE  # of whose: ``SharedTrainingMaster.checkpoint_updaters``
    best: tuple[Best, Snapshot | None] | None = None
    epochs_done: int | None = None  # by a fit that is done; None: it is not
    summaries: dict[str, Any] = field(default_factory=dict)  # of fits that are done, by number


def checkpoint_of(model: FlatModel, fit: FitToSave) -> Checkpoint:
    """All of it, as a file holds it."""
    spec, snapshot = fit.spec, fit.snapshot
    best, best_copy = fit.best or (None, None)
    states = _named(fit.states)
    description = {
        "model": model.describe(),
        "n_params": spec.n_params,
        "k": fit.k,
        "key": asdict(fit.key),
        "epochs": spec.epochs,
        "epochs_done": fit.epochs_done,
        "first_epoch": spec.first_epoch,
        "minibatches_before": spec.minibatches_before,
        "commit": snapshot.commit,
        "partitions": [[*s.position, s.rows, s.checksum, s.batches] for s in snapshot.partitions],
        "threshold": fit.threshold,
        "updaters": _updaters_said(fit),
        "figures": fit.figures,
        "best": None if best is None else asdict(best),
        "summaries": fit.summaries,
    }
    arrays: dict[str, NDArray[Any]] = {
        "parameters": snapshot.parameters,
        "buffers": np.frombuffer(snapshot.buffers, np.uint8),
        **{name: np.frombuffer(state, np.uint8) for name, state in states.items()},
    }
    if best_copy is not None:
        arrays["best_parameters"] = best_copy.parameters
        arrays["best_buffers"] = np.frombuffer(best_copy.buffers, np.uint8)
    return Checkpoint(description, arrays)


def _name_of(states: LentStates, partition: int) -> str:
    """Of the array; one's own may be that for all."""
    return STATE if states.own[partition] == states.one else f"{STATE}_of_{partition}"


def _named(states: LentStates) -> dict[str, bytes]:
    """Each once."""
    own = {_name_of(states, partition): state for partition, state in states.own.items()}
    return own | {STATE: states.one}


def _updaters_said(fit: FitToSave) -> dict[str, Any]:
    """Whose state lies where, and who had none to give and goes on with the one for all."""
    own = {str(partition): _name_of(fit.states, partition) for partition in sorted(fit.states.own)}
    trains = [i for i, start in enumerate(fit.snapshot.partitions) if start.rows]
    left_out = [i for i in trains if i not in fit.states.own] if fit.wanted == ALL else []
    return {"wanted": fit.wanted, "own": own, "left_out": left_out}


@dataclass(frozen=True, slots=True)
class Resumption:
    """A checkpoint, as a fit goes on from it."""

    path: str
    key: FitKey
    epochs: int
    epochs_done: int | None  # None: that fit was not done
    k: int
    parameters: Flat
    buffers: bytes
    states: LentStates
    left_out: tuple[int, ...]  # partitions whose own was wanted, and could not be had
    threshold: str
    first_epoch: int  # of that fit
    minibatches_before: int
    commit: int  # of that fit's run
    starts: tuple[PartitionStart, ...]
    figures: Figures
    best: tuple[Best, Snapshot | None] | None
    summaries: dict[str, Any]

    @property
    def minibatches(self) -> int:
        """Of that fit, which are in the parameters."""
        return sum(start.minibatches for start in self.starts)

    @property
    def trained(self) -> dict[int, int]:
        """Epochs that each partition with rows is through."""
        return {i: s.position.epoch for i, s in enumerate(self.starts) if s.rows}

    def starts_for(self, workers: int) -> tuple[PartitionStart, ...]:
        """Where so many workers begin.

        As many as there were: exactly there. Others have other rows: all begin with the first
        epoch that some partition was not through.
        """
        if workers == len(self.starts):
            return self.starts
        whole = min(self.trained.values(), default=0)
        return (PartitionStart(Position(whole, 0)),) * workers

    def figures_for(self, workers: int) -> Figures:
        """Of the epochs before that."""
        parts = self.figures["parts"] if workers == len(self.starts) else []
        return {"whole": self.figures["whole"], "parts": parts}


def resumption_of(path: str, checkpoint: Checkpoint, model: FlatModel) -> Resumption:
    """Read it.

    Raise UsageError where it is of another model or another optimizer, and CheckpointDamaged where
    its description is not one that ``checkpoint_of`` made.
    """
    try:
        msgspec.convert(checkpoint.description, _Description)
        EpochBook().go_on(checkpoint.description["figures"])
        return _resumption_of(path, checkpoint, model)
    except SparkstromError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        why = f"its description does not fit ({type(error).__name__}: {first_line(error)})"
        raise CheckpointDamaged(path, why) from error


Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Number = Annotated[int, msgspec.Meta(ge=1, le=2**62)]


class _Description(msgspec.Struct):
    """The types and ranges of a checkpoint's description."""

    model: dict[str, Any]
    key: FitKey
    epochs: Number
    epochs_done: Count | None
    k: Annotated[int, msgspec.Meta(ge=-(2**10), le=2**10)]
    first_epoch: Count
    minibatches_before: Count
    commit: Annotated[int, msgspec.Meta(ge=EARLIER_RUN)]
    partitions: list[tuple[Count, Count, Annotated[int, msgspec.Meta(ge=-1)], int, Count]]
    threshold: str
    figures: dict[str, list[Any]]
    best: Best | None
    summaries: dict[str, Any]
    updaters: dict[str, Any] | None = None


def _resumption_of(path: str, checkpoint: Checkpoint, model: FlatModel) -> Resumption:
    said, arrays = checkpoint.description, checkpoint.arrays
    check_same(model.describe(), said["model"], path)
    parameters, buffers = arrays["parameters"], arrays["buffers"].tobytes()
    if parameters.shape != (model.n_params,):
        raise UsageError(
            f"{path} holds {parameters.size:,} parameters, the model given has {model.n_params:,}:"
            f" make it of the same code as then, or {ELSEWHERE}"
        )
    updaters = said.get("updaters", {"own": {}, "left_out": []})  # older ones have one for all
    states = LentStates(
        arrays[STATE].tobytes(),
        {int(index): arrays[name].tobytes() for index, name in updaters["own"].items()},
    )
    _check_states(path, model, parameters, states)
    best = None
    if said["best"] is not None:
        best_copy = None
        if "best_parameters" in arrays:
            best_buffers = arrays["best_buffers"].tobytes()
            best_copy = Snapshot(EARLIER_RUN, arrays["best_parameters"], best_buffers, ())
        best = Best(**said["best"]), best_copy
    return Resumption(
        path=path,
        key=FitKey(**said["key"]),
        epochs=said["epochs"],
        epochs_done=said["epochs_done"],
        k=said["k"],
        parameters=parameters,
        buffers=buffers,
        states=states,
        left_out=tuple(updaters["left_out"]),
        threshold=said["threshold"],
        first_epoch=said["first_epoch"],
        minibatches_before=said["minibatches_before"],
        commit=said["commit"],
        starts=tuple(
            PartitionStart(Position(epoch, batch), *rest)
            for epoch, batch, *rest in said["partitions"]
        ),
        figures=said["figures"],
        best=best,
        summaries=said["summaries"],
    )


def _check_states(path: str, model: FlatModel, parameters: Flat, states: LentStates) -> None:
    """On the driver, before any work starts."""
    if not states.one:
        return
    tried = copy.deepcopy(model)
    tried.bind(parameters.copy())
    try:
        for state in (states.one, *states.own.values()):
            tried.load_updater_state(updater_in(state))
    except Exception as error:  # whatever a library says to a state that is not its own
        raise UsageError(
            f"{path} holds an optimizer's state that the model given does not take"
            f" ({type(error).__name__}: {error}): give the optimizer of then, or {ELSEWHERE}"
        ) from error


def load_buffers(model: FlatModel, buffers: bytes) -> None:
    """Into a model that has some."""
    if isinstance(model, Buffered) and buffers:
        model.load_buffers_bytes(buffers)


STATE = "state"  # the array with the one for all
ELSEWHERE = "begin anew with another checkpoint_directory or resume=False"
