"""Tests of fits in rounds on each backend in one process: results, reports and checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from sparkstrom.base.errors import TrainingError, UsageError
from sparkstrom.base.identity import Position
from sparkstrom.codec.optimizer_state_codec import decode_state_untrusted
from sparkstrom.fit.supervisor import FitCancelled
from sparkstrom.models import Adam, DenseNetwork, Nesterov, Sgd
from sparkstrom.models.base import FitLength
from sparkstrom.observe.epoch_history import EpochHistory
from sparkstrom.rounds import averaging as rounds_state
from sparkstrom.rounds.backend import EpochPlan
from sparkstrom.runtime.optimizer_states import OptimizerStates
from tests.unit.rounds.in_process_fits import BACKENDS, Fit, make_partitions, rehearsal_backend

EPOCHS, WORKERS = 3, 2
MakeFit = Callable[..., Fit]


def make_network(updater: Any = None) -> DenseNetwork:
    return DenseNetwork([6, 5, 3], updater=updater or Nesterov(0.1), seed=1)


@pytest.fixture(params=list(BACKENDS))
def make_fit(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> MakeFit:
    """Return ``make_fit(model, rows, ...)`` for one of the backends; by default 45 and 30 rows."""
    backend = BACKENDS[request.param](tmp_path, monkeypatch)
    rows = make_partitions(45, 30)

    def make(model: Any, rows: Any = rows, *begun: Any, **options: Any) -> Fit:
        return Fit(backend, model, rows, *begun, **options)

    return make


@pytest.fixture
def make_fit_on_each_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[Fit]]:
    """Return a function that creates the same fit on each backend."""

    def make(*given: Any, **options: Any) -> list[Fit]:
        every = [make_backend(tmp_path, monkeypatch) for make_backend in BACKENDS.values()]
        return [Fit(backend, *given, **options) for backend in every]

    return make


# --- What fits learn ------------------------------------------------------------------------------


def median_accumulator(before: Any, after: Any, rows: Any) -> Any:
    assert after.shape == (len(rows), before.size)
    return np.median(after, axis=0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"save_updater": "own", "averaging_frequency": 3},
        {"outer": Nesterov(0.7, 0.9), "save_updater": "own"},
        {"accumulator": median_accumulator},
        {"accumulator": median_accumulator, "outer": Sgd(0.5), "save_updater": "own"},
    ],
    ids=["averaged", "own", "diloco", "accumulator", "accumulator-outer-own"],
)
def test_all_backends_give_same_bits(
    make_fit_on_each_backend: Callable[..., list[Fit]], options: dict[str, Any]
) -> None:
    """Parameters, states and histories are equal, also with an outer optimizer or accumulator."""
    given = {"epochs": 2, "fraction": 0.2, **options}
    spark, local = make_fit_on_each_backend(
        make_network(Adam()), make_partitions(45, 30, 17), **given
    )
    rehearsed = Fit(rehearsal_backend, make_network(Adam()), make_partitions(45, 30, 17), **given)
    histories = [fit.history() for fit in (spark, local)]
    rehearsed.run()  # evaluates no held-out rows, so that its history lacks them
    assert spark.state.digest() == local.state.digest() == rehearsed.state.digest()
    assert histories[0] == histories[1]
    for fit in (local, rehearsed):
        for one, other in zip(
            *(f.state.copy_states().encoded() for f in (spark, fit)), strict=True
        ):
            ours, theirs = decode_state_untrusted(one), decode_state_untrusted(other)
            assert ours.keys() == theirs.keys()
            assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_accumulator_gets_rows_of_trained_workers_and_readonly_params(make_fit: MakeFit) -> None:
    """The accumulator gets the rows of workers that trained, and read-only parameters."""
    seen: list[tuple[list[int], bool]] = []

    def first(before: Any, after: Any, rows: Any) -> Any:
        seen.append((rows.tolist(), after.flags.writeable))
        before[:] = 0  # a copy
        return after[0]

    fit = make_fit(make_network(Sgd(0.1)), epochs=1, accumulator=first, outer=Sgd(1.0))
    fit.run()
    both, alone = [8, 8], [[8], [5]]
    assert [rows for rows, _ in seen] == [*[both] * 3, [8, 6], *alone]
    assert not any(writeable for _, writeable in seen)


def test_invalid_accumulator_result_ends_fit_with_reason(make_fit: MakeFit) -> None:
    """An accumulator that fails or returns wrong parameters ends the fit with the reason."""
    for accumulator, why in (
        (lambda before, after, rows: before[:3], r"accumulator returned float32\[3\], or values"),
        (lambda before, after, rows: before * np.inf, r"accumulator returned .* are not finite"),
        (lambda before, after, rows: 1 / 0, "accumulator raised ZeroDivisionError"),
    ):
        with pytest.raises(TrainingError, match=why), np.errstate(all="ignore"):
            make_fit(make_network(), accumulator=accumulator).run()


def test_nonfinite_parameters_after_last_step_raise_training_error(make_fit: MakeFit) -> None:
    """Parameters that diverge in a fit's last step appear in no loss."""
    rows = [[(50 * x, y) for x, y in part] for part in make_partitions(45, 30)]
    words = r"layer . \w+ is -?(inf|nan) after round 1: "
    with np.errstate(all="ignore"), pytest.raises(TrainingError, match=words) as raised:
        make_fit(make_network(Sgd(3e38)), rows, batch_rows=99).run()
    assert "accumulator" not in str(raised.value)


class WeightRecordingNetwork(DenseNetwork):
    """A network whose buffers are the weights with which they were averaged last."""

    last = b"-"

    def buffers_bytes(self) -> bytes:
        return self.last

    def load_buffers_bytes(self, buffers: bytes) -> None:
        self.last = buffers

    def average_buffers(self, reports: list[bytes]) -> bytes:
        return b"equally"

    def weighed_buffers(self, reports: list[bytes], weights: Sequence[float]) -> bytes:
        return repr([*weights]).encode()


def test_buffers_are_weighted_by_rows(make_fit: MakeFit) -> None:
    fit = make_fit(WeightRecordingNetwork([6, 3]), epochs=1, batch_rows=99)
    fit.run()
    assert fit.state.buffers == b"[45.0, 30.0]"


# --- Schedules ------------------------------------------------------------------------------------


class ScheduleRecordingNetwork(DenseNetwork):
    """A network that records the positions and fit lengths that it is given."""

    positions: ClassVar[list[tuple[int, int]]] = []
    lengths: ClassVar[list[FitLength]] = []

    def keep_pace(self, workers: int, minibatches: int, counted: int) -> None:
        self.positions.append((workers, minibatches))

    def set_fit_length(self, length: FitLength) -> None:
        self.lengths.append(length)


class OwnStepsNetwork(ScheduleRecordingNetwork):
    """A scheduled network that counts each worker's own steps, like DL4J's."""

    counts_own_steps = True


@pytest.fixture(autouse=True)
def _forget() -> None:
    """Clear the recorded positions and lengths."""
    ScheduleRecordingNetwork.positions.clear()
    ScheduleRecordingNetwork.lengths.clear()


def test_schedule_position_counts_minibatches_of_all_workers(make_fit: MakeFit) -> None:
    """An epoch has 12 and 8 minibatches, in rounds of two per worker; earlier fits had 100."""
    make_fit(ScheduleRecordingNetwork([6, 5, 3]), epochs=2, minibatches_before=100).run()
    both = [at for first in range(0, 16, 4) for at in (first, first + 2, first, first + 2)]
    epoch = [*both, 16, 17, 18, 19]
    assert ScheduleRecordingNetwork.positions == [
        (1, 100 + start + at) for start in (0, 20) for at in epoch
    ]


def test_dl4j_schedule_counts_own_steps_of_each_worker(make_fit: MakeFit) -> None:
    make_fit(OwnStepsNetwork([6, 5, 3]), epochs=1).run()
    both = [at for first in range(0, 8, 2) for at in (first, first + 1, first, first + 1)]
    assert ScheduleRecordingNetwork.positions == [(1, at) for at in [*both, 8, 9, 10, 11]]


def test_model_gets_fit_length(make_fit: MakeFit) -> None:
    before = {"first_epoch": 7, "minibatches_before": 100}
    make_fit(ScheduleRecordingNetwork([6, 5, 3]), epochs=2, **before).run()
    assert set(ScheduleRecordingNetwork.lengths) == {FitLength(2, 2 * (12 + 8), 7, 100)}


# --- Epochs, snapshots and checkpoints ------------------------------------------------------------


class ProgramEnd(Exception):
    """An exception in place of the end of the program."""


def checkpoint_before_evaluation(make_fit: MakeFit, epoch: int) -> Any:
    """Return a checkpoint's content from just before this epoch is measured."""
    fit, book, saved = make_fit(make_network(), epochs=EPOCHS, fraction=0.2), EpochHistory(), []

    def save(plan: EpochPlan) -> None:
        progress = fit.control.progress
        fit.control.acknowledge(progress)
        book.add_counters(progress.stats.values())
        if plan.epoch == epoch:
            snapshot = fit.control.snapshot(updaters=True)
            copies = fit.control.copy_optimizer_states(everybody=False).result()
            at = {index: one.position.epoch for index, one in enumerate(snapshot.partitions)}
            figures = json.loads(json.dumps(book.report(at)))
            saved.append((snapshot, OptimizerStates.from_copies(copies), figures))
            raise ProgramEnd

    fit.on_measure = save
    with pytest.raises(ProgramEnd):
        fit.run()
    return saved[0]


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_resumed_fit_evaluates_epoch_trained_before_checkpoint(
    make_fit: MakeFit, epoch: int
) -> None:
    """The resumed fit has the same bits and figures as one fit, and counts no row twice."""
    whole = make_fit(make_network(), epochs=EPOCHS, fraction=0.2)
    expected = whole.history()
    snapshot, states, figures = checkpoint_before_evaluation(make_fit, epoch)
    book = EpochHistory()
    book.restore(figures)
    assert book.epochs_resumed_from == epoch
    options: dict[str, Any] = {"starts": snapshot.partitions, "epochs": EPOCHS, "fraction": 0.2}
    rows = make_partitions(45, 30)
    again = make_fit(make_network(), rows, snapshot.parameters, states, **options)
    found = again.history(book)
    assert [one.validation for one in found] == [one.validation for one in expected]
    assert [one.epoch for one in found] == [1, 2, 3]
    assert (again.state.parameters == whole.state.parameters).all()
    outcome = again.control.outcome()
    assert outcome.minibatches == outcome.minibatches_expected
    assert outcome.minibatches_resumed * EPOCHS == outcome.minibatches * (epoch + 1)
    trained = sum(one.training.steps for one in outcome.stats.values() if one.training)
    assert trained == outcome.minibatches_trained


def test_partition_evaluated_by_older_version_is_not_evaluated_again(
    make_fit: MakeFit,
) -> None:
    """Older versions measured each partition of a machine after its own last round of the epoch."""
    snapshot, states, _ = checkpoint_before_evaluation(make_fit, 1)
    first, second = snapshot.partitions
    starts = (first, replace(second, position=Position(2, 0)))
    options: dict[str, Any] = {"starts": starts, "epochs": EPOCHS, "fraction": 0.2}
    fit = make_fit(make_network(), make_partitions(45, 30), snapshot.parameters, states, **options)
    reports = [json.loads(said)["epochs"] for said in fit.run()]
    epochs = [[one["epoch"] for one in report["epochs"]] for report in reports]
    assert epochs == [[1, 2], [2]]


def test_reading_progress_does_not_move_positions(make_fit: MakeFit) -> None:
    """Only ``acknowledge`` moves the partitions' positions past the end of an epoch."""
    fit = make_fit(make_network(), epochs=1, fraction=0.2, has_observer=True)
    control, positions = fit.control, list[list[Position]]()

    def seen() -> list[Position]:
        return [one.position for one in control.snapshot().partitions]

    waited = []

    def wait(epochs: int) -> None:
        waited.append(epochs)
        before = control.progress
        for _ in range(3):
            assert control.progress is before
            positions.append(seen())
        assert control._barrier._handled == 0

    control._barrier.wait = wait  # type: ignore[method-assign]
    fit.run()
    batches = [one.batches for one in control.partitions]
    assert waited == [1]
    assert positions == [[Position(0, b) for b in batches]] * 3


def test_snapshot_passes_epoch_end_after_acknowledgement(
    make_fit: MakeFit,
) -> None:
    """A checkpoint has an epoch's figures, or else a resumed fit measures the epoch again."""
    fit = make_fit(make_network(), epochs=1, fraction=0.2)
    control, positions, before = fit.control, list[list[Position]](), fit.control.progress

    def seen() -> list[Position]:
        return [one.position for one in control.snapshot().partitions]

    end_epoch = control.end_epoch

    def ended(*given: Any) -> None:
        end_epoch(*given)
        control.acknowledge(before)
        positions.append(seen())
        progress = control.progress
        assert all(one.training.epochs for one in progress.stats.values())  # type: ignore[union-attr]
        control.acknowledge(progress)
        positions.append(seen())

    control.end_epoch = ended  # type: ignore[method-assign]
    fit.run()
    batches = [one.batches for one in control.partitions]
    assert positions == [[Position(0, b) for b in batches], [Position(1, 0)] * WORKERS]


def test_epochs_end_without_held_out_rows(make_fit: MakeFit) -> None:
    fit = make_fit(make_network(), epochs=2)
    assert [one.examples for one in fit.history()] == [75, 75]
    assert [one.position for one in fit.control.partitions] == [Position(2, 0)] * WORKERS


def test_parameter_snapshot_does_not_encode_optimizer_states(
    make_fit: MakeFit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encoding would delay the rounds at each of early stopping's snapshots."""
    fit = make_fit(make_network())
    fit.run()
    with monkeypatch.context() as patch:
        patch.setattr(rounds_state, "encode_state", lambda state: pytest.fail("encoded"))
        assert (fit.control.snapshot().parameters == fit.state.parameters).all()
    assert fit.control.copy_optimizer_states(everybody=True).result() == ()


def test_parameter_snapshot_keeps_states_of_earlier_snapshot(
    make_fit: MakeFit,
) -> None:
    """Otherwise a checkpoint could have parameters of one round and states of another."""
    fit, taken = make_fit(make_network(), epochs=1), list[tuple[bytes, ...]]()

    def look(order: Any) -> None:
        taken.append(fit.control.optimizer_copies)
        if order.number == 1:
            fit.control.snapshot(updaters=True)
        fit.control.snapshot()

    fit.on_train = look
    fit.run()
    assert len(set(taken)) == 2
    assert taken[0] == ()
    (of_round_1,) = fit.control.copy_optimizer_states(everybody=True).result()
    assert decode_state_untrusted(of_round_1)["round/steps"] == 2
    assert fit.control.optimizer_copies == ()


# --- Held-out rows --------------------------------------------------------------------------------


def test_partition_with_only_held_out_rows_is_evaluated(make_fit: MakeFit) -> None:
    """A split of rows by time can leave a partition without rows to train on."""
    for seed in range(20):
        fit = make_fit(
            make_network(), make_partitions(45, 1), epochs=2, fraction=0.6, rng_seed=seed
        )
        found = fit.history()
        facts = [tally.facts for tally in fit.control._tallies.values()]
        if facts[1].held_out:
            break
    assert (facts[1].rows, facts[1].held_out) == (0, 1)
    assert [one.held_weight for one in found] == [facts[0].held_out + 1] * 2


class ParameterSumLossNetwork(DenseNetwork):
    """A network whose loss on held-out rows is the sum of its parameters."""

    def loss(self, batch: Any) -> tuple[float, float]:
        return batch.rows * float(self._params.sum(dtype=np.float64)), float(batch.rows)


def test_evaluation_uses_parameters_of_epoch_end(
    make_fit: MakeFit,
) -> None:
    """All partitions are measured with the last round's parameters, also one with fewer rounds."""
    fit, expected = (
        make_fit(ParameterSumLossNetwork([6, 3]), make_partitions(45, 9), epochs=2, fraction=0.3),
        [],
    )
    fit.on_measure = lambda plan: expected.append(fit.state.parameters.sum(dtype=np.float64))
    found = [one.validation for one in fit.history()]
    assert fit.control.partitions[1].batches < fit.control.partitions[0].batches
    assert found == pytest.approx(expected, rel=1e-9)


# --- What models print and raise ------------------------------------------------------------------


class PrintingNetwork(DenseNetwork):
    """A network that prints when it is measured, and then raises ``wrong`` if that is set."""

    wrong: type[Exception] | None = None

    def loss(self, batch: Any) -> tuple[float, float]:
        print("measured", batch.rows)
        if self.wrong is not None:
            raise self.wrong("this loss of a user's\nis wrong")
        return super().loss(batch)


class ValueErrorNetwork(PrintingNetwork):
    wrong = ValueError


class UsageErrorNetwork(PrintingNetwork):
    wrong = UsageError


class FailingStepNetwork(DenseNetwork):
    def step(self, batch: Any) -> float:
        print("class 7 is nan")
        raise ValueError("no")


def test_output_of_failed_round_is_reported(make_fit: MakeFit) -> None:
    """The error names the failed step's place, and the round's printed lines are reported."""
    fit = make_fit(FailingStepNetwork([6, 3]))
    with pytest.raises(TrainingError, match=r"^ValueError: no \(partition 0 on .*, training\)"):
        fit.run()
    lines = fit.control.progress.heard
    assert {(line.phase, line.text) for line in lines} == {("training", "class 7 is nan")}


def test_output_during_evaluation_is_reported(make_fit: MakeFit) -> None:
    fit = make_fit(PrintingNetwork([6, 3], updater=Sgd(0.1)), epochs=1, fraction=0.5)
    fit.run()
    lines = fit.control.progress.heard
    assert {line.phase for line in lines} == {"measuring"}
    assert all(line.text.startswith("measured ") for line in lines)
    assert fit.control.progress.stats[1].training.epochs  # type: ignore[union-attr]


def test_evaluation_error_names_partition_and_phase(make_fit: MakeFit) -> None:
    """An error while measuring names the place; a ``UsageError`` is raised unchanged."""
    fit = make_fit(ValueErrorNetwork([6, 3], updater=Sgd(0.1)), epochs=1, fraction=0.5)
    with pytest.raises(TrainingError) as raised:
        fit.run()
    words = r"^ValueError: this loss of a user's \(partition 0 on \w+, measuring\)"
    assert raised.match(words)
    assert "is wrong" in raised.value.trace
    assert {line.phase for line in fit.control.progress.heard} == {"measuring"}
    with pytest.raises(UsageError):
        make_fit(UsageErrorNetwork([6, 3]), epochs=1, fraction=0.5).run()


# --- The end --------------------------------------------------------------------------------------


def test_cancelled_fit_trains_no_further_round(make_fit: MakeFit) -> None:
    fit, trained = make_fit(make_network(), epochs=3), list[int]()

    def look(order: Any) -> None:
        trained.append(order.number)
        if order.number == 1:
            fit.control.give_up("an error elsewhere")

    fit.on_train = look
    with pytest.raises(FitCancelled, match="nobody waits for its rounds"):
        fit.run()
    assert trained == [0, 1]


def test_requested_stop_ends_fit_after_current_round(make_fit: MakeFit) -> None:
    fit = make_fit(make_network(), epochs=3)
    fit.on_train = lambda order: fit.control.request_stop("enough") if order.number else None
    fit.run()
    outcome = fit.control.outcome()
    assert (outcome.commits, outcome.stop_reason) == (2, "enough")


def test_zero_weight_rows_keep_parameters(make_fit: MakeFit) -> None:
    """A round in which all rows have weight 0 leaves the parameters as they were."""
    fit = make_fit(
        make_network(), [[(x, y, 0.0) for x, y in part] for part in make_partitions(45, 30)]
    )
    before = fit.state.parameters
    fit.run()
    assert fit.state.parameters is before
    assert fit.control.outcome().minibatches == fit.control.outcome().minibatches_expected == 20
