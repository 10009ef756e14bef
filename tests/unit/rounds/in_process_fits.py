"""Fits in rounds whose workers run in this process; all other parts are the real ones."""

from __future__ import annotations

import contextlib
import itertools
import json
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkstrom import ParameterAveragingTrainingMaster, SharedTrainingMaster
from sparkstrom.data.column_selection import ColumnSpec
from sparkstrom.data.row_blocks import read_row_blocks
from sparkstrom.local import rounds as local_rounds
from sparkstrom.local import rounds as rounds_worker
from sparkstrom.local.data import partition_rows, read_data_blocks
from sparkstrom.local.fit_runner import LocalFitContext, PartitionedRows
from sparkstrom.local.worker_main import run_task
from sparkstrom.local.worker_pool import WorkerAnswer, WorkerTask
from sparkstrom.observe.epoch_history import Epoch, EpochHistory
from sparkstrom.planning.memory import PieceSizes
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.rehearsal.conditions import Conditions, StepTimes
from sparkstrom.rehearsal.fit import FitRecipe, make_environment
from sparkstrom.rehearsal.rounds import RehearsedRounds
from sparkstrom.rounds.averaging import RoundOptions, RoundState
from sparkstrom.rounds.backend import EpochPlan, PartitionFacts, RoundOrder, RoundsBackend
from sparkstrom.rounds.control import RoundsControl
from sparkstrom.rounds.run import RoundsLoop
from sparkstrom.runtime.optimizer_states import OptimizerStates
from sparkstrom.spark.rounds import tasks
from sparkstrom.spark.rounds.backend import SparkRoundsBackend
from sparkstrom.spark.rounds.tasks import RoundInput, SparkRoundsJob, StoredRounds
from sparkstrom.worker.task_environment import TaskEnvironment, load_batches

Rows = Sequence[tuple[np.ndarray, Any]]  # (features, label)

BATCH_ROWS = 4
_fits = itertools.count(1)  # a Python worker caches a fit's job under this number


def make_partitions(*counts: int, seed: int = 0) -> list[Rows]:
    """Return random partitions with these numbers of rows."""
    chance = np.random.default_rng(seed)
    return [
        [(chance.normal(size=6).astype(np.float32), int(chance.integers(3))) for _ in range(count)]
        for count in counts
    ]


# --- Spark ----------------------------------------------------------------------------------------


class PartitionRecords:
    """Records of one RDD, by partition."""

    def __init__(self, each: Sequence[list[bytes]], backend: InProcessSparkBackend) -> None:
        self._each, self._backend = each, backend

    def collect(self, run: Any) -> list[Any]:
        self._backend.check_aborted()
        found: list[Any] = []
        for index, records in enumerate(self._each):
            self._backend.partition = index
            found += run(index, records)
        return found


class RoundRecords:
    """The records of stored rounds, by target partition."""

    def __init__(
        self, backend: InProcessSparkBackend, cut: StoredRounds, targets: list[list[bytes]]
    ) -> None:
        self._backend, self._cut, self._targets = backend, cut, targets

    def get_round_records(
        self, number: int, start: RoundInput, *, measures: bool = False
    ) -> PartitionRecords:
        first = self._cut.first_target(number)
        return PartitionRecords(self._targets[first : first + self._cut.workers], self._backend)


class InMemoryBroadcast:
    """A broadcast of the parameters whose content stays in memory."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        self._parts = [*parts]

    def contents(self, records: Iterator[bytes]) -> Iterator[bytes]:
        yield from self._parts

    def destroy(self) -> None:
        self._parts.clear()


class InProcessSparkBackend(SparkRoundsBackend):
    """A backend whose Spark tasks run one after another in this process."""

    def __init__(self, job: SparkRoundsJob, rows: Sequence[Rows], scratch: Path) -> None:
        super().__init__(job)
        self._rows, self._scratch, self.partition = rows, scratch, 0

    def environment(self) -> TaskEnvironment:
        return TaskEnvironment(self.partition, 0, "host", "jvm", self._scratch)

    def keep_rows(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def inspect(self, task: Any) -> list[Any]:
        everybody = PartitionRecords([[]] * len(self._rows), self)
        return everybody.collect(lambda index, _: task(read_row_blocks, index, self._rows[index]))

    def max_rounds_stored_at_once(self, facts: Sequence[PartitionFacts]) -> int:
        return 2

    @contextlib.contextmanager
    def store_minibatches(self, cut: StoredRounds, task: Any) -> Iterator[RoundRecords]:
        targets: list[list[bytes]] = [[] for _ in range(cut.targets)]
        for target, record in self.inspect(task):
            targets[target].append(record)
        yield RoundRecords(self, cut, targets)

    def send_parts(self, nbytes: int, parts: Iterator[bytes]) -> InMemoryBroadcast:
        return InMemoryBroadcast(parts)


# --- One machine ----------------------------------------------------------------------------------


class SingleThreadPool:
    threads = 1

    def __init__(self, workers: int) -> None:
        self._workers = workers

    def __len__(self) -> int:
        return self._workers

    def translate_closing_errors(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class InProcessWorkers:
    """``ActiveWorkers`` whose tasks run at once in this process."""

    def __init__(self, pool: Any) -> None:
        self._everybody, self.attempts = range(len(pool)), Counter[int]()
        self._there: dict[int, list[Any]] = {p: [] for p in self._everybody}
        self._answers: dict[int, WorkerAnswer] = {}

    def begin(self) -> range:
        return self._everybody

    def send(self, partition: int, task: WorkerTask) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rounds_worker, "_worker", self._there[partition])
            self._answers[partition] = run_task(task)

    def answers(self, of: Iterable[int]) -> Iterator[tuple[int, WorkerAnswer]]:
        for partition in list(of):
            yield partition, self._answers.pop(partition)

    def drop(self, partitions: Iterable[int]) -> None:
        pass


# --- A fit ----------------------------------------------------------------------------------------


class Fit:
    """A fit whose rounds ``run`` trains in the calling thread.

    ``on_train`` and ``on_measure`` are called before a round is trained or held-out rows measured.
    """

    def __init__(
        self,
        backend: Callable[..., RoundsBackend],
        model: Any,
        rows: Sequence[Rows],
        parameters: Any = None,
        states: OptimizerStates | None = None,
        *,
        has_observer: bool = False,
        batch_rows: int = BATCH_ROWS,
        rng_seed: int = 0,
        **given: Any,
    ) -> None:
        names = ("averaging_frequency", "save_updater", "outer", "accumulator")
        options = {name: given.pop(name) for name in names if name in given}
        given = {"workers": len(rows), "epochs": 1, "job": next(_fits), **given}
        self.spec = FitSpec(n_params=model.n_params, version="test", **given)
        rule = RoundOptions(**{"averaging_frequency": 2, "save_updater": True, **options})
        begun = model.initial() if parameters is None else parameters
        self.state = RoundState(model, rule, begun, states or OptimizerStates(), 0)
        self.backend = backend(self.spec, model, rule, rows, batch_rows, rng_seed)
        self.control = RoundsControl(
            self.spec, self.state, has_observer=has_observer, abort=self.backend.abort
        )
        self._loop = RoundsLoop(self.backend, self.control, rule.averaging_frequency)
        self.on_train: Callable[[RoundOrder], None] = lambda order: None
        self.on_measure: Callable[[EpochPlan], None] = lambda plan: None
        for name in ("train", "measure"):
            method = getattr(self.backend, name)
            setattr(self.backend, name, self._observed(method, f"on_{name}"))

    def _observed(self, method: Callable[..., Any], hook: str) -> Callable[..., Any]:
        def call(what: Any, state: RoundState) -> Any:
            getattr(self, hook)(what)
            return method(what, state)

        return call

    def run(self) -> list[str]:
        """Train all rounds and return the workers' reports; raise the error if the fit failed."""
        said = self._loop.run()
        if self.control.failure is not None:
            raise self.control.failure
        return said

    def history(self, book: EpochHistory | None = None) -> list[Epoch]:
        """Run the fit and return its epochs."""
        book = book or EpochHistory()
        book.add_reports([json.loads(said)["epochs"] for said in self.run()])
        return book.history()


def spark_backend(scratch: Path, patch: pytest.MonkeyPatch) -> Callable[..., RoundsBackend]:
    """Return a function that creates Spark's backend for a fit."""

    def make(
        spec: FitSpec, model: Any, rule: RoundOptions, rows: Any, batch_rows: int, seed: int
    ) -> RoundsBackend:
        master = ParameterAveragingTrainingMaster(
            batch_size_per_worker=batch_rows,
            rng_seed=seed,
            averaging_frequency=rule.averaging_frequency,
            save_updater=rule.save_updater,
            outer=rule.outer,
            accumulator=rule.accumulator,
        )
        backend = InProcessSparkBackend(
            SparkRoundsJob(spec, model, master, (), PieceSizes()), rows, scratch
        )
        patch.setattr(tasks, "get_task_context", backend.environment)
        patch.setattr(tasks, "count_retries", lambda: 0)
        patch.setattr(tasks, "freeze_garbage_collector", lambda: None)
        return backend

    return make


def local_backend(scratch: Path, patch: pytest.MonkeyPatch) -> Callable[..., RoundsBackend]:
    """Return a function that creates a local backend; rows may be data of any kind."""
    patch.setattr(local_rounds, "ActiveWorkers", InProcessWorkers)
    directories = itertools.count()

    def make(
        spec: FitSpec, model: Any, rule: RoundOptions, rows: Any, batch_rows: int, seed: int
    ) -> RoundsBackend:
        directory = scratch / f"fit-{next(directories)}"
        files = []
        for partition, own in enumerate(rows):
            folder = directory / str(partition)
            folder.mkdir(parents=True)
            files += partition_rows(read_data_blocks(own, ColumnSpec()), 1, 0, folder)
        master = SharedTrainingMaster(batch_size_per_worker=batch_rows, rng_seed=seed)
        pool: Any = SingleThreadPool(len(files))
        context = LocalFitContext(model, master, "a network", pool, directory)
        shared = PartitionedRows(tuple(files), directory)
        return local_rounds.LocalRounds(context, spec, rule, shared)

    return make


def rehearsal_backend(
    spec: FitSpec, model: Any, rule: RoundOptions, rows: Any, batch_rows: int, seed: int
) -> RoundsBackend:
    """Return the backend of a rehearsal, which evaluates no held-out rows."""
    master = SharedTrainingMaster(batch_size_per_worker=batch_rows, rng_seed=seed)
    recipe = FitRecipe(
        model,
        pickle.dumps(model),
        model.initial(),
        0,
        master,
        spec.epochs,
        spec.fraction,
        rounds=rule,
    )
    partitions = [
        load_batches(recipe.job(len(rows)), make_environment(p), read_row_blocks(p, own))
        for p, own in enumerate(rows)
    ]
    conditions = Conditions(1e9, 1e-3, StepTimes(0.1))
    return RehearsedRounds(recipe, partitions, conditions, None, lambda fraction: None)


BACKENDS = {"spark": spark_backend, "local": local_backend}
