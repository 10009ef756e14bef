"""Tests of ParameterAveragingTrainingMaster: valid and refused options, and their effects."""

from __future__ import annotations

import pickle
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sparkstrom import ParameterAveragingTrainingMaster
from sparkstrom.base.errors import UsageError
from sparkstrom.checkpoint.directory import CheckpointDirectory
from sparkstrom.data.row_blocks import read_row_blocks
from sparkstrom.data.row_store import prefetch
from sparkstrom.fit.checkpoints import FitCheckpoints, FitKey, ResumeAction, build_checkpoint
from sparkstrom.fit.fit_context import TaskSlots
from sparkstrom.models import Adam, DenseNetwork, Nesterov, Sgd
from sparkstrom.models.base import Batch
from sparkstrom.options.gradient_sharing import ALL, ONE
from sparkstrom.options.parameter_averaging import ALIASES, REFUSED, needs_repartitioning
from sparkstrom.options.resolution import from_json, replace_options, resolve, to_json
from sparkstrom.planning.memory import PieceSizes
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.rounds.averaging import RoundResults, RoundState, tree_levels
from sparkstrom.rounds.backend import EpochPlan
from sparkstrom.rounds.worker_round import RoundBatch, RoundReport, RoundStart, train_locally
from sparkstrom.runtime.optimizer_states import OptimizerStates
from sparkstrom.spark.executor_slots import count_workers
from sparkstrom.spark.fit_strategies import strategy_for
from sparkstrom.spark.ml.params import convert_master
from sparkstrom.spark.rounds.tasks import (
    PackedJob,
    SparkRoundReport,
    SparkRoundsJob,
    StoredRounds,
    prefetch_minibatches,
    split_results,
    split_round,
)
from sparkstrom.worker.task_environment import TaskEnvironment, load_batches
from tests.unit.spark.test_checkpoint_content import make_content

PLACE = TaskEnvironment(1, 5, "host", "jvm", Path("/nowhere"))
MODEL = DenseNetwork([6, 3], updater=Adam(), seed=1)


def make_master(**options: Any) -> ParameterAveragingTrainingMaster:
    return ParameterAveragingTrainingMaster(**options)


def make_job(**options: Any) -> SparkRoundsJob:
    spec = FitSpec(workers=2, epochs=1, n_params=MODEL.n_params, version="test")
    return SparkRoundsJob(spec, MODEL, make_master(**options), (), PieceSizes())


def load_random_batches(job: SparkRoundsJob, place: TaskEnvironment = PLACE, rows: int = 20) -> Any:
    """Return minibatches of random rows of partition 1, stored as a worker stores them."""
    chance = np.random.default_rng(0)
    given = [(x, 1) for x in chance.normal(size=(rows, 6)).astype(np.float32)]
    return load_batches(job, place, read_row_blocks(1, given))


def test_master_survives_pickle_and_json() -> None:
    """A master stays equal through pickle, JSON, replace_options and the ML params' converter."""
    master = make_master(averaging_frequency=7, outer=Nesterov(0.7, 0.9), save_updater="own")
    copy = pickle.loads(pickle.dumps(master))
    assert copy == master
    assert copy.given == master.given == {"averaging_frequency", "outer", "save_updater"}
    assert from_json(to_json(master)) == master
    assert replace_options(master, rng_seed=3) == replace(master, rng_seed=3)
    assert convert_master(master).value is master  # used for the grids of a CrossValidator


def test_dl4j_names_set_same_fields() -> None:
    theirs = make_master(worker_prefetch_num_batches=3, repartition_data="never")
    assert theirs == make_master(prefetch=3, repartition="never")
    assert set(ALIASES.values()) <= {"prefetch", "repartition"}


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("averaging_frequency", 0, "must be a whole number of at least 1"),
        ("save_updater", "mine", "must be True, False or 'own'"),
        ("outer", 0.7, r"such as Nesterov\(0.7, 0.9\)"),
        ("prefetch", -1, "at least 0 minibatches"),
        ("aggregation_depth", 0, "at least 1"),
        ("repartition", "sometimes", "must be one of always, never"),
        ("storage_level", "MEMORY_ONLY_SER", "must be None or one of DISK_ONLY"),
        ("batch_size_per_worker", 0, "at least 1"),
        ("export_directory", "/x", "nothing is exported unless"),
    ],
)
def test_invalid_option_error_names_option_and_valid_values(
    option: str, value: object, words: str
) -> None:
    """The error of an invalid value names the option and the valid values."""
    with pytest.raises(UsageError, match=f"{option}=.*{words}"):
        make_master(**{option: value})


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_rejects_gradient_sharing_option_with_reason(name: str) -> None:
    """An option that averaging does not have, such as ``threshold``, is refused with a reason."""
    with pytest.raises(UsageError, match=f"ParameterAveragingTrainingMaster takes no {name}: "):
        make_master(**{name: 1})


def test_options_are_read_from_spark_configuration() -> None:
    conf = {
        "spark.sparkstrom.averaging_frequency": "500",
        "spark.sparkstrom.outer": "Nesterov(0.7, 0.9)",
        "spark.sparkstrom.save_updater": "own",
        "spark.sparkstrom.network_mask": "10.0.0.0/8",  # of gradient sharing; ignored here
    }
    made = resolve(make_master(batch_size_per_worker=8), conf, {"SPARKSTROM_PREFETCH": "0"})
    assert made.averaging_frequency == 500
    assert (made.outer, made.save_updater, made.prefetch) == (Nesterov(0.7, 0.9), "own", 0)
    assert resolve(make_master(outer=Sgd(0.5)), conf, {}).outer == Sgd(0.5)
    with pytest.raises(UsageError, match=r"must be one of Sgd, Nesterov.*like Nesterov\(0.7, 0.9"):
        resolve(make_master(), {"spark.sparkstrom.outer": "WarmUp(3)"}, {})
    with pytest.raises(UsageError, match="did you mean averaging_frequency"):
        resolve(make_master(), {"spark.sparkstrom.averaging_frequenzy": "5"}, {})


@pytest.mark.flips(
    "ParameterAveragingTrainingMaster.batch_size_per_worker",
    "ParameterAveragingTrainingMaster.averaging_frequency",
)
def test_averaging_frequency_and_batch_size_determine_round() -> None:
    """A round has averaging_frequency minibatches of batch_size_per_worker rows per worker."""
    for rows, each, wanted in ((4, 2, [4, 4]), (8, 2, [8, 8]), (4, 3, [4, 4, 4])):
        job = make_job(batch_size_per_worker=rows, averaging_frequency=each)
        batches = load_random_batches(job)
        ends = (0, batches.batches_per_epoch)
        plan = EpochPlan(0, each, firsts=(0, 0), ends=ends, held_out=False)
        cut = StoredRounds(plan, range(1), (0, batches.checksum))
        *pieces, last = split_round(batches, cut, 0, 1)
        assert [len(piece.arrays[0]) for piece in pieces if piece.arrays] == wanted
        assert (last.number, last.total, last.arrays) == (len(wanted), len(wanted), None)


@pytest.mark.flips("ParameterAveragingTrainingMaster.rng_seed")
def test_rng_seed_determines_row_order() -> None:
    first = [
        load_random_batches(make_job(rng_seed=seed)).get(0, 0).features.tolist()
        for seed in (0, 0, 1)
    ]
    assert first[0] == first[1] != first[2]


@pytest.mark.flips("ParameterAveragingTrainingMaster.batch_memory_bytes")
def test_rows_beyond_batch_memory_bytes_spill_to_disk(tmp_path: Path) -> None:
    """Rows beyond batch_memory_bytes are written to disk."""
    place = replace(PLACE, scratch=tmp_path)
    little, much = (
        load_random_batches(make_job(batch_memory_bytes=limit), place, rows=200_000)
        for limit in (16 << 20, 256 << 20)
    )
    assert little.spilled_bytes > much.spilled_bytes == 0
    little.close()


@pytest.mark.flips("ParameterAveragingTrainingMaster.workers_per_node")
def test_workers_per_node_determines_worker_count() -> None:
    slots = TaskSlots(executors=3, per_executor=4)
    assert [
        count_workers(slots, strategy_for(make_master(workers_per_node=n))) for n in (-1, 1, 2)
    ] == [12, 3, 6]
    with pytest.raises(UsageError, match="an executor has 4 task slots"):
        count_workers(slots, strategy_for(make_master(workers_per_node=5)))


def train_one_minibatch(**options: Any) -> tuple[SparkRoundReport, list[str]]:
    """Train one minibatch as worker 1; return its report and the names of the sent arrays."""
    job, report = make_job(**options).without_accumulator(), SparkRoundReport(1, "host")
    chance = np.random.default_rng(0)
    features = chance.normal(size=(8, 6)).astype(np.float32)
    batch = Batch(features, np.zeros(8, np.int64))
    state = {"mean": np.zeros(21, np.float32), "square": np.zeros(21, np.float32), "steps": 0}
    beginning = RoundStart(MODEL.initial(), b"", state, 0)  # type: ignore[arg-type]
    turns = iter([RoundBatch(batch, (0, 0, 1))])
    pieces = split_results(job, train_locally(MODEL, beginning, turns), report)
    return report, [piece.name for piece in pieces]


@pytest.mark.flips("ParameterAveragingTrainingMaster.save_updater")
def test_save_updater_determines_sent_optimizer_states() -> None:
    """save_updater decides whether optimizer states are averaged, kept per worker, or not sent."""
    averaged, names = train_one_minibatch()
    assert names == ["parameters", "updater/mean", "updater/square"]
    assert averaged.scalars == {"steps": 1}
    assert averaged.sent_bytes == 3 * 4 * 21
    _, names = train_one_minibatch(save_updater="own")
    assert names == ["parameters", "1/updater/mean", "1/updater/square"]
    fresh, names = train_one_minibatch(save_updater=False)
    assert (names, fresh.scalars, fresh.sent_bytes) == (["parameters"], {}, 4 * 21)
    assert [make_master(save_updater=s).checkpoint_updaters for s in (True, "own")] == [ONE, ALL]


@pytest.mark.flips("ParameterAveragingTrainingMaster.accumulator")
def test_accumulator_receives_parameters_of_every_worker() -> None:
    """Each worker's parameters are sent under its own name; the function stays in the driver."""
    stays = threading.Lock()  # cannot be pickled

    def accumulator(before: Any, after: Any, rows: Any) -> Any:
        with stays:
            return after[0]

    job = make_job(accumulator=accumulator)
    assert PackedJob.pack(job.without_accumulator()).unpack().accumulates
    _, names = train_one_minibatch(accumulator=accumulator)
    assert names == ["1/parameters", "updater/mean", "updater/square"]
    with pytest.raises(UsageError, match="accumulator='mean': must be None or a function"):
        make_master(accumulator="mean")


@pytest.mark.flips("ParameterAveragingTrainingMaster.outer")
def test_outer_optimizer_continues_from_saved_state() -> None:
    """The outer optimizer moves the parameters, and continues exactly from its saved state."""
    began, mean = MODEL.initial(), MODEL.initial() + 1
    reports = [RoundReport(0, steps=3, weight=8.0)]
    made = {}
    for outer in (None, Sgd(0.5), Nesterov(0.7, 0.9)):
        common = RoundState(
            MODEL, make_master(outer=outer, save_updater=False), began, OptimizerStates(), 0
        )
        common.advance(RoundResults(reports, mean.copy()))
        made[outer] = common
        assert (common.steps, common.rounds) == (3, 1)
    assert (made[None].parameters == mean).all()
    assert np.allclose(made[Sgd(0.5)].parameters, began + 0.5)
    nesterov = made[Nesterov(0.7, 0.9)]
    master = make_master(outer=Nesterov(0.7, 0.9), save_updater=False)
    saved = OptimizerStates.from_copies(nesterov.copy_states().encoded())
    again = RoundState(MODEL, master, nesterov.parameters, saved, 0)
    assert again.steps == 3
    for common in (nesterov, again):
        common.advance(RoundResults(reports, mean.copy()))
    assert (again.parameters == nesterov.parameters).all()
    assert again.digest() == nesterov.digest()


@pytest.mark.flips("ParameterAveragingTrainingMaster.prefetch")
def test_prefetch_option_sets_number_of_minibatches_read_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``prefetch`` is the number of minibatches that are read ahead, 2 by default."""
    asked: list[int] = []
    monkeypatch.setattr(
        "sparkstrom.spark.rounds.tasks.prefetch",
        lambda turns, count: asked.append(count) or iter(turns),
    )
    for options in ({}, {"prefetch": 0}):
        report = SparkRoundReport(0)
        with pytest.raises(EOFError, match="minibatches of a round arrived"):
            list(prefetch_minibatches(make_job(**options), [], report))
    assert asked == [2, 0]


def test_prefetching_keeps_order_and_passes_errors_on() -> None:
    """Reading ahead raises the source's error, keeps the order, and can be stopped."""

    def numbers() -> Any:
        yield from range(5)
        raise KeyError("five")

    for count in (0, 1, 3):
        found: list[int] = []
        with pytest.raises(KeyError, match="five"):
            found.extend(prefetch(numbers(), count))
        assert found == [0, 1, 2, 3, 4]
        taken = prefetch(iter(range(1000)), count)
        assert [next(taken), next(taken)] == [0, 1]
        taken.close()
        assert "sparkstrom-prefetching" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.flips("ParameterAveragingTrainingMaster.aggregation_depth")
def test_aggregation_depth_determines_tree_levels() -> None:
    """aggregation_depth determines the number of groups on each level of the tree of sums."""
    depths = [make_master(aggregation_depth=depth).aggregation_depth for depth in (1, 2, 3, 4)]
    assert [tree_levels(27, depth) for depth in depths] == [[], [], [5], [9, 3]]
    assert tree_levels(1, 4) == tree_levels(2, 3) == []


@pytest.mark.flips("ParameterAveragingTrainingMaster.repartition")
def test_repartition_option_decides_whether_rows_move() -> None:
    """Rows are redistributed always, never, or if partitions and workers differ in number."""
    data = SimpleNamespace(getNumPartitions=lambda: 4)
    ways = ("always", "never", "num_partitions_workers_differs")
    assert [
        needs_repartitioning(make_master(repartition=way).repartition, data, 4) for way in ways
    ] == [
        True,
        False,
        False,
    ]
    assert needs_repartitioning(ways[2], data, 3)


@pytest.mark.flips(
    "ParameterAveragingTrainingMaster.checkpoint_directory",
    "ParameterAveragingTrainingMaster.checkpoint_every",
    "ParameterAveragingTrainingMaster.keep_last",
    "ParameterAveragingTrainingMaster.resume",
)
def test_checkpoint_options_reach_directory_and_resume(tmp_path: Path) -> None:
    """Checkpoint options reach the configured directory; ``resume`` decides whether it is used."""

    def kept(**options: Any) -> Any:
        found = FitCheckpoints(MODEL, make_master(**options), "a network")
        return found.config(FitKey(1), 20, OptimizerStates()), found

    assert kept()[0] is None
    url = str(tmp_path)
    some, _ = kept(checkpoint_directory=url, checkpoint_every="7 updates", keep_last=2)
    assert (some.every.amount, some.every.unit, some.directory.keep_last) == (7, "updates", 2)
    assert some.threshold == "None"
    other, _ = kept(checkpoint_directory=url, resume=False)
    assert other.every != some.every
    assert other.directory.keep_last == 3
    said: list[str] = []
    CheckpointDirectory(url).write(build_checkpoint(MODEL, make_content(MODEL)))
    found = [
        kept(checkpoint_directory=url, resume=resume)[1].find(FitKey(1), 5, said.append)
        for resume in (True, False)
    ]
    assert [decision and decision.action for decision in found] == [ResumeAction.SKIP, None]
    assert "has the result of fit 1" in said[0]
