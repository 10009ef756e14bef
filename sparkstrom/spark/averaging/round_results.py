"""Round results: a round's job, and what the driver program takes of its results.

Results that are small go to the driver program as they are. Larger ones are cut; each executor adds
up some of the pieces, of all workers, and the driver program takes the means in several jobs: no
result, closure or broadcast holds a whole vector. What a stage has computed Spark keeps meanwhile.
"""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkstrom.spark.averaging.byte_shuffle import groups_of
from sparkstrom.spark.averaging.pieces import (
    ArrayPiece,
    CutArray,
    Told,
    bytes_by_target,
    groups_in_tree,
    means,
    whole_records,
)
from sparkstrom.spark.averaging.round_engine import RoundRecords
from sparkstrom.spark.averaging.round_job import AveragingJob, PackedJob, RoundInput, RoundReport
from sparkstrom.spark.averaging.round_tasks import (
    MeanRound,
    ShuffledRound,
    SummedRound,
    direct_round,
)
from sparkstrom.spark.driver.memory_parts import demand_of
from sparkstrom.spark.driver.rounds_memory import result_bytes, sent_bytes


@dataclass(slots=True)
class Results:
    """Of a round."""

    reports: list[RoundReport] = field(default_factory=list)  # by worker
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)  # means; states' of each as own

    def report(self, records: Iterable[ArrayPiece | Told]) -> None:
        """Who was there, and the shapes of what comes."""
        told = [record.what for record in records if isinstance(record, Told)]
        self.reports = sorted(told, key=lambda one: one.partition)

    def fill(self, records: Iterable[ArrayPiece | Told]) -> None:
        """Put means where they belong."""
        shapes = {name: shape for one in self.reports for name, shape in one.shapes.items()}
        for record in records:
            if not isinstance(record, ArrayPiece):
                continue
            if record.name not in self.arrays:
                self.arrays[record.name] = np.empty(*shapes[record.name])
            flat = self.arrays[record.name].reshape(-1)
            flat[record.begin : record.begin + record.values.size] = record.values


def fetched(rows: RoundRecords, packed: PackedJob, job: AveragingJob, given: RoundInput) -> Results:
    """Run a round on these rows, one partition for each worker."""
    workers, sizes, demand = job.spec.workers, job.sizes, demand_of(job.model)
    size = sent_bytes(demand, job.master)
    if workers * size <= sizes.direct:
        return _direct(rows, packed, given, workers)
    by_sum = -(-size // (sizes.piece * sizes.at_once))
    by_results = -(-result_bytes(demand, job.master, workers) // sizes.of_target)
    return _by_parts(rows, packed, job, given, max(by_sum, by_results))


def _direct(rows: RoundRecords, packed: PackedJob, given: RoundInput, workers: int) -> Results:
    records = whole_records(rows.answers(partial(direct_round, packed, given)), range(workers))
    found = Results()
    found.report(records)
    found.fill(means(records))
    return found


def _by_parts(
    rows: RoundRecords, packed: PackedJob, job: AveragingJob, given: RoundInput, targets: int
) -> Results:
    depth, sizes, workers = job.master.aggregation_depth, job.sizes, job.spec.workers
    levels = [*groups_in_tree(workers, depth), 1]
    written = ShuffledRound(packed, given, levels[0], workers, targets)
    summed, sources = rows.shuffled(written, levels[0] * (targets + 1)), workers
    for groups, following in itertools.pairwise(levels):
        level = SummedRound(sources, groups, following, targets, job.piece_bytes)
        summed, sources = summed.shuffled(level, following * (targets + 1)), groups
    found = Results()
    with summed.results(MeanRound(sources, depth > 1)) as fetch:
        found.report(_opened(fetch([targets])))
        if any(report.error is not None for report in found.reports):
            return found
        coming = _arrays(found.reports, depth > 1)
        loads = bytes_by_target(coming, targets, job.piece_bytes)
        for group in groups_of(loads.tolist(), sizes.collected):
            records = _opened(fetch(group))
            found.fill(records if depth > 1 else means(records))
    return found


def _arrays(reports: Sequence[RoundReport], are_means: bool) -> Iterable[CutArray]:
    """Those that the driver program gets: each as a mean, or every worker's."""
    sizes = [
        CutArray(name, math.prod(shape), np.dtype(dtype).itemsize)
        for report in reports
        if report.weight
        for name, (shape, dtype) in report.shapes.items()
    ]
    return dict.fromkeys(sizes) if are_means else sizes


def _opened(records: Iterable[bytes]) -> list[ArrayPiece | Told]:
    return [pickle.loads(content) for content in records]
