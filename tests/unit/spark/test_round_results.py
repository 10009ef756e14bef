"""What a round's results come to in one job of the driver program, whatever the workers."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from sparkstrom import ParameterAveragingTrainingMaster
from sparkstrom.models import Adam, DenseNetwork
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.spark.averaging.pieces import Told, pieces_of
from sparkstrom.spark.averaging.round_job import AveragingJob, PieceSizes, RoundReport
from sparkstrom.spark.averaging.round_results import fetched
from sparkstrom.spark.averaging.round_tasks import addressed
from sparkstrom.spark.driver.memory_parts import Demand
from sparkstrom.spark.driver.rounds_memory import round_driver_parts

MODEL = DenseNetwork([20, 32, 10], updater=Adam())
ARRAYS = ("parameters", "updater/mean", "updater/square")
CLASSIC = PieceSizes(piece=1 << 10, direct=0, collected=16 << 10)  # a 4096th of what is usual
CONNECT = PieceSizes(piece=1 << 7, direct=0, collected=16 << 10, at_once=8)


class Rows:
    """What so many workers send, and how many bytes of values each job has brought of it."""

    def __init__(self, job: AveragingJob) -> None:
        self._job, self.jobs = job, list[int]()

    def shuffled(self, written: Any, targets: int) -> Rows:
        self._sent: list[list[bytes]] = [[] for _ in range(targets)]
        for worker in range(self._job.spec.workers):
            for target, record in self._of(worker, targets - 1):
                self._sent[target].append(record)
        return self

    def _of(self, worker: int, targets: int) -> Iterator[tuple[int, bytes]]:
        own = f"{worker}/" if self._job.master.save_updater == "own" else ""
        values = np.full(MODEL.n_params, worker, np.float32)
        names = (name if name == "parameters" else own + name for name in ARRAYS)
        arrays = dict.fromkeys(names, values)
        report = RoundReport(worker, "h", "e", 0, weight=1.0)
        report.shapes = {name: (array.shape, array.dtype.str) for name, array in arrays.items()}
        size = self._job.piece_bytes
        records = [Told(worker, report), *pieces_of(worker, arrays.items(), 1.0, size)]
        yield from addressed(records, worker, 0, targets, size)

    @contextlib.contextmanager
    def results(self, run: Any) -> Iterator[Any]:
        def fetch(partitions: Sequence[int]) -> list[bytes]:
            found = [record for index in partitions for record in run(index, self._sent[index])]
            if partitions[0] < len(self._sent) - 1:
                pieces = (pickle.loads(record) for record in found)
                self.jobs.append(sum(piece.values.nbytes for piece in pieces))
            return found

        yield fetch


def rows_of(workers: int, sizes: PieceSizes, **options: Any) -> tuple[Rows, Any]:
    spec = FitSpec(workers=workers, epochs=1, n_params=MODEL.n_params, version="test")
    job = AveragingJob(spec, MODEL, ParameterAveragingTrainingMaster(**options), (), sizes)
    rows: Any = Rows(job)
    given: Any = None
    return rows, fetched(rows, given, job, given)


@pytest.mark.parametrize("sizes", [CLASSIC, CONNECT], ids=["classic", "connect"])
@pytest.mark.parametrize("workers", [2, 24, 50])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("save_updater", [True, "own"])
def test_a_job_brings_so_much_however_many_workers_there_are(
    workers: int, save_updater: Any, depth: int, sizes: PieceSizes
) -> None:
    rows, found = rows_of(workers, sizes, save_updater=save_updater, aggregation_depth=depth)
    assert max(rows.jobs) <= sizes.collected
    mean = np.float32((workers - 1) / 2)
    assert (found.arrays["parameters"] == mean).all()
    if save_updater == "own":
        assert len(found.arrays) == 1 + 2 * workers
        assert (found.arrays[f"{workers - 1}/updater/square"] == workers - 1).all()
    else:
        assert (found.arrays["updater/mean"] == mean).all()


@pytest.mark.parametrize("workers", [2, 64])
def test_the_plan_has_what_a_job_brings(workers: int) -> None:
    def planned(n_params: int, **options: Any) -> int:
        master = ParameterAveragingTrainingMaster(**options)
        parts = round_driver_parts(Demand(n_params, "adam"), master, workers)
        return next(part.bytes for part in parts if part.name == "results of one job")

    assert planned(1000) == 3 * 4000
    assert planned(1000, save_updater=False) == 4000
    assert planned(1000, save_updater="own") == (1 + 2 * workers) * 4000
    assert planned(1000, aggregation_depth=1) == workers * 3 * 4000
    assert planned(100_000_000, save_updater="own") == PieceSizes().collected
