"""Rounds session: a worker of synchronous rounds, in its own process.

Parameters lie in one file that all map: row 0 is what a round begins with, row 1 + p what partition
p made of it. A worker that takes over begins the round anew from row 0, so nothing is lost and
nothing counts twice.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparkstrom.base.clock import SystemClock
from sparkstrom.base.errors import TrainingError
from sparkstrom.codec.states import decode_state_untrusted, encode_state
from sparkstrom.local.dealt_rows import RowFile
from sparkstrom.local.fit_files import write_file
from sparkstrom.local.host_way import HostJob
from sparkstrom.local.step_limit import limit
from sparkstrom.models.base import Buffered, Epochal, Flat, Paced
from sparkstrom.models.outputs import measured
from sparkstrom.observe.epochs import EpochLog, Finished
from sparkstrom.observe.telemetry import NodeCounters, TrainingCounters, WorkerCounters, to_wire
from sparkstrom.runtime.replica import NOT_FINITE_LOSS
from sparkstrom.runtime.round_step import weight_of
from sparkstrom.runtime.worker_output import WorkerOutput, captured
from sparkstrom.spark.data.row_blocks import Block
from sparkstrom.spark.executor.own_rows import batches_of
from sparkstrom.spark.executor.task_place import TaskPlace
from sparkstrom.spark.executor.tasks import settle

PARAMETERS, BUFFERS, STATE = "parameters", "buffers", "updater"  # files
F32 = np.dtype("<f4")


def parameters_in(directory: Path, n_params: int, *, writable: bool) -> Flat:
    """f32[1 + workers, n_params], shared by all processes that map it."""
    mode: Any = "r+" if writable else "r"
    return np.memmap(directory / PARAMETERS, F32, mode).reshape(-1, n_params)


def own(name: str, partition: int) -> str:
    """The file of a partition's own, beside what is everybody's."""
    return f"{name}-{partition}"


def left(name: str, partition: int) -> str:
    """The file of what a partition has come to, in a round that may begin anew."""
    return f"{own(name, partition)}-left"


class RoundsSession:
    """Trains some minibatches on order, again and again."""

    def __init__(
        self, job: HostJob, place: TaskPlace, blocks: Iterator[Block], directory: Path
    ) -> None:
        settle(job, place)
        self._spec, self._partition, self._directory = job.spec, place.partition, directory
        self.batches = batches_of(job, place, blocks)
        self._step_s = job.master.step_timeout
        limit.allow(self._step_s)
        self._model, self._sleep_s = job.model, job.master.debug_longer_iterations / 1000
        self._shared = parameters_in(directory, job.spec.n_params, writable=True)
        self._params = np.array(self._shared[0])
        self._model.bind(self._params)
        self.epochs = EpochLog(place.partition, place.attempt)
        self._seconds: dict[str, float] = {}
        self._counts = TrainingCounters(
            partition=place.partition,
            attempt=place.attempt,
            rows_held_out=self.batches.held_out.rows,
            spilled_bytes=self.batches.spilled_bytes,
        )
        self._sums = {"steps": 0, "examples": 0, "loss_sum": 0.0, "rounds": 0}
        self._epoch = {"examples": 0, "loss_sum": 0.0}
        self._last = dict(self._epoch)
        self.output = WorkerOutput(SystemClock())
        self.output.phase = lambda: "training"

    def begin(self) -> None:
        """Take what a round begins with."""
        limit.allow(self._step_s)
        self._params[:] = self._shared[0]
        content = self._read(BUFFERS)
        if content and isinstance(self._model, Buffered):
            self._model.load_buffers_bytes(content)

    def load_state(self, *names: str) -> None:
        """An updater's, out of the first file that there is; or else a fresh one stays."""
        for content in filter(None, map(self._read, names)):
            self._model.load_updater_state(decode_state_untrusted(content))
            return

    def train(self, epoch: int, first: int, count: int, steps_before: int) -> tuple[int, float]:
        """So many minibatches; return how many rows these were, and what they weigh."""
        rows, weight = 0, 0.0
        for index in range(first, first + count):
            began_s = time.monotonic()
            limit.allow(self._step_s)
            batch = self.batches.get(epoch, index)
            limit.allow(self._step_s)
            read_s = time.monotonic()
            time.sleep(self._sleep_s)
            if isinstance(self._model, Epochal):
                self._model.stand_at(*self.batches.place(epoch, index))
            if isinstance(self._model, Paced):
                done = steps_before + index - first
                self._model.keep_pace(1, done, done)
            loss = self._model.step(batch)
            if not np.isfinite(loss):
                raise TrainingError(NOT_FINITE_LOSS.format(loss))
            self._spend("reading", read_s - began_s)
            self._spend("stepping", time.monotonic() - read_s)
            rows += batch.rows
            weight += weight_of(batch)
            for sums in (self._sums, self._epoch):
                sums["examples"] += batch.rows
                sums["loss_sum"] += batch.rows * loss
            self._sums["steps"] += 1
        return rows, weight

    def leave(self) -> None:
        """Parameters, buffers and the updater's state where the calling process finds them."""
        began_s = time.monotonic()
        limit.allow(self._step_s)
        self._shared[1 + self._partition] = self._params
        self._sums["rounds"] += 1
        if isinstance(self._model, Buffered) and (content := self._model.buffers_bytes()):
            self._write(left(BUFFERS, self._partition), content)
        self._write(left(STATE, self._partition), encode_state(self._model.updater_state()))
        self._spend("encoding", time.monotonic() - began_s)

    def measure(self, epoch: int) -> None:
        """An epoch is over: rows that are held out, under what all have now."""
        self._last, self._epoch = self._epoch, {"examples": 0, "loss_sum": 0.0}
        figures = []
        for batch in self.batches.held_out:
            limit.allow(self._step_s)
            figures.append(measured(self._model, batch, self._spec.metric))
        held = (sum(f[0] for f in figures), sum(f[1] for f in figures))
        last = self._last
        self.epochs.add(Finished(epoch, last["loss_sum"], int(last["examples"]), *held))

    def digest(self) -> str:
        """SHA-256 of parameters and buffers, as ``Theta.digest``."""
        buffers = self._model.buffers_bytes() if isinstance(self._model, Buffered) else b""
        return hashlib.sha256(self._params.tobytes() + buffers).hexdigest()

    def counters(self) -> dict[str, float]:
        """All that it did, as telemetry has it; a round sends all parameters."""
        told = asdict(self._counts) | {
            "steps": self._sums["steps"],
            "examples": self._sums["examples"],
            "loss_sum": self._sums["loss_sum"],
            "last_examples": self._last["examples"],
            "last_loss_sum": self._last["loss_sum"],
            "publications": self._sums["rounds"],
            "hits": self._sums["rounds"] * self._spec.n_params,
            "seconds": dict(self._seconds),
            "epochs": self.epochs.figures(),
        }
        sent = int(self._sums["rounds"]) * F32.itemsize * self._spec.n_params
        return to_wire(WorkerCounters(TrainingCounters(**told), NodeCounters(update_bytes=sent)))

    def _spend(self, what: str, seconds: float) -> None:
        self._seconds[what] = self._seconds.get(what, 0.0) + seconds

    def _read(self, name: str) -> bytes:
        path = self._directory / name
        return path.read_bytes() if path.exists() else b""

    def _write(self, name: str, content: bytes) -> None:
        write_file(self._directory / name, content)


_here: list[RoundsSession] = []  # of this process: one at most


@dataclass(frozen=True, slots=True)
class BeginRounds:
    """Read the rows, and wait for the first round."""

    job: bytes  # a packed HostJob
    place: TaskPlace
    rows: RowFile
    directory: str

    def carry_out(self) -> str:
        """How many rows there are, what they are like, and how many are held out."""
        _here.clear()
        directory = Path(self.directory)
        made = RoundsSession(pickle.loads(self.job), self.place, self.rows.blocks(), directory)
        made.load_state(own(STATE, self.place.partition), STATE)
        _here.append(made)
        batches = made.batches
        held_out = batches.held_out.rows
        return json.dumps([batches.rows, batches.checksum, batches.per_epoch, held_out])


@dataclass(frozen=True, slots=True)
class TrainRound:
    """Train so many minibatches from here, out of what all have."""

    epoch: int
    first: int
    count: int
    averages_state: bool
    steps_before: int  # of each worker

    def carry_out(self) -> str:
        """How many rows, their weight, the counters, and what the model said."""
        (session,) = _here
        with captured(session.output):
            session.begin()
            if self.averages_state:
                session.load_state(STATE)
            trained = session.train(self.epoch, self.first, self.count, self.steps_before)
            session.leave()
        said = session.output.take()
        heard = ([], 0) if said is None else (said.lines, said.skipped)
        return json.dumps([*trained, session.counters(), heard])


@dataclass(frozen=True, slots=True)
class EndEpoch:
    """Measure what is held out, under what all have."""

    epoch: int

    def carry_out(self) -> str:
        """The counters."""
        (session,) = _here
        session.begin()
        session.measure(self.epoch)
        return json.dumps(session.counters())


@dataclass(frozen=True, slots=True)
class EndRounds:
    """Say what the parameters are in the end."""

    def carry_out(self) -> str:
        """Their hash, and the report of a task."""
        (session,) = _here
        session.begin()
        session.batches.close()
        _here.clear()
        report = {"ended": "done", "mass_dismissed": 0.0, "epochs": session.epochs.report()}
        return json.dumps([session.digest(), report])
