"""ParameterAveragingTrainingMaster: what it takes, what it refuses, and what each option does."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sparkstrom import ParameterAveragingTrainingMaster
from sparkstrom.base.errors import UsageError
from sparkstrom.models import Adam, DenseNetwork, Nesterov, Sgd
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.runtime.lent_state import LentStates
from sparkstrom.runtime.prefetching import prefetched
from sparkstrom.runtime.round_step import Beginning, Turn
from sparkstrom.spark.averaging.common_state import CommonState
from sparkstrom.spark.averaging.pieces import groups_in_tree
from sparkstrom.spark.averaging.round_job import AveragingJob, PieceSizes, RoundReport
from sparkstrom.spark.averaging.round_tasks import EpochCut, _minibatches, _timed, _trained
from sparkstrom.spark.data.row_blocks import blocks_of_rows
from sparkstrom.spark.driver.averaging_master import ALIASES, REFUSED, moves
from sparkstrom.spark.driver.cluster import Slots, workers_for
from sparkstrom.spark.driver.fit_checkpoints import FitCheckpoints, FitKey
from sparkstrom.spark.driver.option_json import changed, from_json, to_json
from sparkstrom.spark.driver.settings import resolve
from sparkstrom.spark.driver.training_master import ALL, ONE
from sparkstrom.spark.executor.own_rows import batches_of
from sparkstrom.spark.executor.task_place import TaskPlace
from sparkstrom.spark.ml.estimator_params import a_master

PLACE = TaskPlace(1, 5, "host", "jvm", Path("/nowhere"))
MODEL = DenseNetwork([6, 3], updater=Adam(), seed=1)


def master_of(**options: Any) -> ParameterAveragingTrainingMaster:
    return ParameterAveragingTrainingMaster(**options)


def job_of(**options: Any) -> AveragingJob:
    spec = FitSpec(workers=2, epochs=1, n_params=MODEL.n_params, version="test")
    return AveragingJob(spec, MODEL, master_of(**options), (), PieceSizes())


def batches_for(job: AveragingJob, place: TaskPlace = PLACE, rows: int = 20) -> Any:
    chance = np.random.default_rng(0)
    given = [(x, 1) for x in chance.normal(size=(rows, 6)).astype(np.float32)]
    return batches_of(job, place, blocks_of_rows(1, given))


def test_it_is_a_value_that_travels() -> None:
    master = master_of(averaging_frequency=7, outer=Nesterov(0.7, 0.9), save_updater="own")
    copy = pickle.loads(pickle.dumps(master))
    assert copy == master
    assert copy.given == master.given == {"averaging_frequency", "outer", "save_updater"}
    assert from_json(to_json(master)) == master
    assert changed(master, rng_seed=3) == replace(master, rng_seed=3)
    assert a_master(master).value is master  # as a grid of a CrossValidator has it


def test_dl4j_s_names_reach_the_same_fields() -> None:
    theirs = master_of(worker_prefetch_num_batches=3, repartition_data="never")
    assert theirs == master_of(prefetch=3, repartition="never")
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
def test_what_cannot_work_is_refused_by_name(option: str, value: object, words: str) -> None:
    with pytest.raises(UsageError, match=f"{option}=.*{words}"):
        master_of(**{option: value})


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_means_nothing_here_is_refused_with_its_reason(name: str) -> None:
    with pytest.raises(UsageError, match=f"ParameterAveragingTrainingMaster takes no {name}: "):
        master_of(**{name: 1})


def test_options_come_from_sparks_configuration_too() -> None:
    conf = {
        "spark.sparkstrom.averaging_frequency": "500",
        "spark.sparkstrom.outer": "Nesterov(0.7, 0.9)",
        "spark.sparkstrom.save_updater": "own",
        "spark.sparkstrom.network_mask": "10.0.0.0/8",  # another program's
    }
    made = resolve(master_of(batch_size_per_worker=8), conf, {"SPARKSTROM_PREFETCH": "0"})
    assert made.averaging_frequency == 500
    assert (made.outer, made.save_updater, made.prefetch) == (Nesterov(0.7, 0.9), "own", 0)
    assert resolve(master_of(outer=Sgd(0.5)), conf, {}).outer == Sgd(0.5)
    with pytest.raises(UsageError, match=r"must be one of Sgd, Nesterov.*like Nesterov\(0.7, 0.9"):
        resolve(master_of(), {"spark.sparkstrom.outer": "WarmUp(3)"}, {})
    with pytest.raises(UsageError, match="did you mean averaging_frequency"):
        resolve(master_of(), {"spark.sparkstrom.averaging_frequenzy": "5"}, {})


@pytest.mark.flips(
    "ParameterAveragingTrainingMaster.batch_size_per_worker",
    "ParameterAveragingTrainingMaster.averaging_frequency",
)
def test_a_round_has_so_many_minibatches_of_so_many_rows() -> None:
    for rows, each, wanted in ((4, 2, [4, 4]), (8, 2, [8, 8]), (4, 3, [4, 4, 4])):
        job = job_of(batch_size_per_worker=rows, averaging_frequency=each)
        batches = batches_for(job)
        cut = EpochCut(0, range(1), (0, 0), (0, batches.checksum), False)
        *pieces, last = _minibatches(job, batches, cut, 0, 1)
        assert [len(piece.arrays[0]) for piece in pieces if piece.arrays] == wanted
        assert (last.number, last.total, last.arrays) == (len(wanted), len(wanted), None)


@pytest.mark.flips("ParameterAveragingTrainingMaster.rng_seed")
def test_the_seed_is_the_order_of_rows() -> None:
    first = [batches_for(job_of(rng_seed=seed)).get(0, 0).features.tolist() for seed in (0, 0, 1)]
    assert first[0] == first[1] != first[2]


@pytest.mark.flips("ParameterAveragingTrainingMaster.batch_memory_bytes")
def test_rows_beyond_their_memory_lie_on_disk(tmp_path: Path) -> None:
    place = replace(PLACE, scratch=tmp_path)
    little, much = (
        batches_for(job_of(batch_memory_bytes=limit), place, rows=200_000)
        for limit in (16 << 20, 256 << 20)
    )
    assert little.spilled_bytes > much.spilled_bytes == 0
    little.close()


@pytest.mark.flips("ParameterAveragingTrainingMaster.workers_per_node")
def test_workers_per_node() -> None:
    slots = Slots(executors=3, per_executor=4)
    assert [workers_for(slots, master_of(workers_per_node=n)) for n in (-1, 1, 2)] == [12, 3, 6]
    with pytest.raises(UsageError, match="an executor has 4 task slots"):
        workers_for(slots, master_of(workers_per_node=5))


def trained(**options: Any) -> tuple[RoundReport, list[str]]:
    job, report = job_of(**options), RoundReport(1, "host", "executor", 0)
    report.seconds["reading"] = 0.0
    chance = np.random.default_rng(0)
    features = chance.normal(size=(8, 6)).astype(np.float32)
    batch = SimpleNamespace(features=features, labels=np.zeros(8, np.int64), weights=None, rows=8)
    state = {"mean": np.zeros(21, np.float32), "square": np.zeros(21, np.float32), "steps": 0}
    beginning = Beginning(MODEL.initial(), b"", state, 0)  # type: ignore[arg-type]
    turns = iter([Turn(batch, (0, 0, 1))])  # type: ignore[arg-type]
    pieces = list(_trained(job, beginning, report, turns))
    return report, [piece.name for piece in pieces]


@pytest.mark.flips("ParameterAveragingTrainingMaster.save_updater")
def test_what_is_sent_of_an_optimizer() -> None:
    averaged, names = trained()
    assert names == ["parameters", "updater/mean", "updater/square"]
    assert averaged.rest == {"steps": 1}
    assert averaged.sent_bytes == 3 * 4 * 21
    _, names = trained(save_updater="own")
    assert names == ["parameters", "1/updater/mean", "1/updater/square"]
    fresh, names = trained(save_updater=False)
    assert (names, fresh.rest, fresh.sent_bytes) == (["parameters"], {}, 4 * 21)
    assert [master_of(save_updater=s).checkpoint_updaters for s in (True, "own")] == [ONE, ALL]


@pytest.mark.flips("ParameterAveragingTrainingMaster.outer")
def test_the_outer_step_and_its_state_go_on_from_saved_states() -> None:
    began, mean = MODEL.initial(), MODEL.initial() + 1
    report = RoundReport(0, "h", "e", 0, steps=3, weight=8.0)
    made = {}
    for outer in (None, Sgd(0.5), Nesterov(0.7, 0.9)):
        common = CommonState(
            MODEL, master_of(outer=outer, save_updater=False), began, LentStates(), 0
        )
        common.advance(mean.copy(), [report], {})
        made[outer] = common
        assert (common.steps, common.rounds) == (3, 1)
    assert (made[None].parameters == mean).all()
    assert np.allclose(made[Sgd(0.5)].parameters, began + 0.5)
    nesterov = made[Nesterov(0.7, 0.9)]
    master = master_of(outer=Nesterov(0.7, 0.9), save_updater=False)
    saved = LentStates.of(nesterov.copies())
    again = CommonState(MODEL, master, nesterov.parameters, saved, 0)
    assert again.steps == 3
    for common in (nesterov, again):
        common.advance(mean.copy(), [report], {})
    assert (again.parameters == nesterov.parameters).all()
    assert again.digest() == nesterov.digest()


@pytest.mark.flips("ParameterAveragingTrainingMaster.prefetch")
def test_minibatches_are_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        "sparkstrom.spark.averaging.round_tasks.prefetched",
        lambda turns, count: asked.append(count) or iter(turns),
    )
    for options in ({}, {"prefetch": 0}):
        report = RoundReport(0, "h", "e", 0)
        with pytest.raises(EOFError, match="minibatches of a round arrived"):
            list(_timed(job_of(**options), [], report))
    assert asked == [2, 0]


def test_prefetching_keeps_order_and_passes_errors_on() -> None:
    def numbers() -> Any:
        yield from range(5)
        raise KeyError("five")

    for count in (0, 1, 3):
        found = []
        with pytest.raises(KeyError, match="five"):
            found.extend(prefetched(numbers(), count)) or found
        taken = prefetched(iter(range(1000)), count)
        assert [next(taken), next(taken)] == [0, 1]
        taken.close()  # its thread ends, too
        assert inspect.getgeneratorstate(taken) == inspect.GEN_CLOSED


@pytest.mark.flips("ParameterAveragingTrainingMaster.aggregation_depth")
def test_the_tree_of_sums() -> None:
    depths = [master_of(aggregation_depth=depth).aggregation_depth for depth in (1, 2, 3, 4)]
    assert [groups_in_tree(27, depth) for depth in depths] == [[], [], [5], [9, 3]]
    assert groups_in_tree(1, 4) == groups_in_tree(2, 3) == []


@pytest.mark.flips("ParameterAveragingTrainingMaster.repartition")
def test_when_rows_are_dealt_anew() -> None:
    data = SimpleNamespace(getNumPartitions=lambda: 4)
    ways = ("always", "never", "num_partitions_workers_differs")
    assert [moves(master_of(repartition=way).repartition, data, 4) for way in ways] == [
        True,
        False,
        False,
    ]
    assert moves(ways[2], data, 3)
    assert moves(ways[2], SimpleNamespace(rdd=data), 3)


@pytest.mark.flips(
    "ParameterAveragingTrainingMaster.checkpoint_directory",
    "ParameterAveragingTrainingMaster.checkpoint_every",
    "ParameterAveragingTrainingMaster.keep_last",
    "ParameterAveragingTrainingMaster.resume",
)
def test_checkpoints(tmp_path: Path) -> None:
    def kept(**options: Any) -> Any:
        found = FitCheckpoints(MODEL, master_of(**options), "a network")
        return found.kept(FitKey(1), 20, LentStates()), found

    assert kept()[0] is None
    url = str(tmp_path)
    some, _ = kept(checkpoint_directory=url, checkpoint_every="7 updates", keep_last=2)
    assert (some.every.amount, some.every.unit, some.directory.keep_last) == (7, "updates", 2)
    assert some.threshold == "None"
    other, _ = kept(checkpoint_directory=url, resume=False)
    assert other.every != some.every
    assert other.directory.keep_last == 3
    said: list[str] = []
    assert kept(checkpoint_directory=url)[1].find(FitKey(1), 1, said.append) is None
    assert kept(checkpoint_directory=url, resume=False)[1].find(FitKey(1), 1, said.append) is None
