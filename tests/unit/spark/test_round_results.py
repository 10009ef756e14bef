"""Tests of collecting a round's results: no job brings too many bytes, with any workers."""

from __future__ import annotations

import contextlib
import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from sparkstrom import ParameterAveragingTrainingMaster
from sparkstrom.models import Adam, DenseNetwork
from sparkstrom.planning.memory import ModelFootprint, PieceSizes, estimate_round_driver_parts
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.rounds.averaging import RoundResults
from sparkstrom.spark.rounds.array_exchange import ReportRecord, split_arrays
from sparkstrom.spark.rounds.backend import assemble_results, train_and_collect
from sparkstrom.spark.rounds.tasks import SparkRoundReport, SparkRoundsJob, route_records

MODEL = DenseNetwork([20, 32, 10], updater=Adam())
ARRAYS = ("parameters", "updater/mean", "updater/square")
CLASSIC = PieceSizes(piece=1 << 10, direct=0, collected=16 << 10)  # 1/4096 of the usual sizes
CONNECT = PieceSizes(piece=1 << 7, direct=0, collected=16 << 10, pieces_per_task=8)


class Rows:
    """Fake rows with the workers' records; ``jobs`` lists the bytes that each job collected."""

    def __init__(self, job: SparkRoundsJob) -> None:
        self._job, self.jobs = job, list[int]()

    def shuffle(self, task: Any, targets: int) -> Rows:
        self._sent: list[list[bytes]] = [[] for _ in range(targets)]
        for worker in range(self._job.spec.workers):
            for target, record in self._records_of(worker, targets - 1):
                self._sent[target].append(record)
        return self

    def _records_of(self, worker: int, targets: int) -> Iterator[tuple[int, bytes]]:
        master, number = self._job.master, f"{worker}/"
        own = number if master.save_updater == "own" else ""
        parameters = number if master.accumulator is not None else ""
        values = np.full(MODEL.n_params, worker, np.float32)
        names = ((parameters if name == "parameters" else own) + name for name in ARRAYS)
        arrays = dict.fromkeys(names, values)
        report = SparkRoundReport(worker, weight=1.0, examples=1, steps=1)
        report.shapes = {name: (array.shape, array.dtype.str) for name, array in arrays.items()}
        size = self._job.piece_bytes
        records = [ReportRecord(worker, report), *split_arrays(worker, arrays.items(), 1.0, size)]
        yield from route_records(records, worker, 0, targets, size)

    @contextlib.contextmanager
    def results(self, run: Any) -> Iterator[Any]:
        def fetch(partitions: Sequence[int]) -> list[bytes]:
            found = [record for index in partitions for record in run(index, self._sent[index])]
            if partitions[0] < len(self._sent) - 1:
                pieces = (pickle.loads(record) for record in found)
                self.jobs.append(sum(piece.values.nbytes for piece in pieces))
            return found

        yield fetch


def collect_results(workers: int, sizes: PieceSizes, **options: Any) -> tuple[Rows, RoundResults]:
    """Return the fake rows, and the results of one round of these workers."""
    spec = FitSpec(workers=workers, epochs=1, n_params=MODEL.n_params, version="test")
    job = SparkRoundsJob(spec, MODEL, ParameterAveragingTrainingMaster(**options), (), sizes)
    rows: Any = Rows(job)
    given: Any = None
    reports, arrays = train_and_collect(rows, given, job, given)
    return rows, assemble_results(job, reports, arrays, Counter())


@pytest.mark.parametrize("sizes", [CLASSIC, CONNECT], ids=["classic", "connect"])
@pytest.mark.parametrize("workers", [2, 24, 50])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("save_updater", [True, "own"])
def test_collected_bytes_per_job_are_limited_with_any_workers(
    workers: int, save_updater: Any, depth: int, sizes: PieceSizes
) -> None:
    """No job collects more than ``sizes.collected`` bytes, and all means and states arrive."""
    rows, found = collect_results(
        workers, sizes, save_updater=save_updater, aggregation_depth=depth
    )
    assert max(rows.jobs) <= sizes.collected
    mean = np.float32((workers - 1) / 2)
    assert (found.parameters == mean).all()
    if save_updater == "own":
        assert {p: set(state) for p, state in found.own.items()} == {  # type: ignore[call-overload]
            p: {"mean", "square"} for p in range(workers)
        }
        assert (found.own[workers - 1]["square"] == workers - 1).all()  # type: ignore[index]
    else:
        assert found.updater is not None
        assert (found.updater["mean"] == mean).all()


@pytest.mark.parametrize("depth", [1, 2])
def test_accumulator_gets_parameters_in_jobs_of_limited_size(depth: int) -> None:
    """A custom accumulator gets every worker's parameters, in jobs of the same limited size."""
    options: dict[str, Any] = {"accumulator": max, "aggregation_depth": depth}
    rows, found = collect_results(24, CLASSIC, **options)
    assert max(rows.jobs) <= CLASSIC.collected
    assert found.parameters is not None
    assert (found.parameters == np.arange(24, dtype=np.float32)[:, None]).all()
    assert found.updater is not None
    assert (found.updater["mean"] == 11.5).all()


@pytest.mark.parametrize("workers", [2, 64])
def test_memory_plan_includes_bytes_collected_by_one_job(workers: int) -> None:
    """The memory plan contains the bytes that one job collects, at most the limit."""

    def planned(n_params: int, **options: Any) -> int:
        master = ParameterAveragingTrainingMaster(**options)
        parts = estimate_round_driver_parts(ModelFootprint(n_params, "adam"), master, workers)
        return next(part.bytes for part in parts if part.name == "results of one job")

    assert planned(1000) == 3 * 4000
    assert planned(1000, save_updater=False) == 4000
    assert planned(1000, save_updater="own") == (1 + 2 * workers) * 4000
    assert planned(1000, aggregation_depth=1) == workers * 3 * 4000
    assert planned(1000, accumulator=max) == (workers + 2) * 4000
    assert planned(100_000_000, save_updater="own") == PieceSizes().collected
