"""Tests of EarlyStoppingListener: when epochs are judged, what is kept, when a fit is stopped."""

from __future__ import annotations

from typing import Any, NoReturn, cast

import numpy as np
import pytest

from sparkstrom.base.errors import TrainingError, UsageError
from sparkstrom.codec.messages import Phase
from sparkstrom.fit.early_stopping_listener import (
    Best,
    EarlyStoppingListener,
    MinibatchLosses,
    check_validation,
)
from sparkstrom.fit.events import FitEvents
from sparkstrom.models import DenseNetwork
from sparkstrom.observe.early_stopping import EarlyStopping
from sparkstrom.observe.epoch_history import Epoch, EpochLog, PartitionEpoch
from sparkstrom.observe.telemetry import TrainingCounters, WorkerCounters
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.runtime.master_control import Progress, Snapshot
from sparkstrom.runtime.master_thread import MasterThread

LOSSES = [5.0, 3.0, 4.0, 4.0, 2.0]


class Master:
    """A fake controller that counts commits and snapshots and records requests to stop."""

    def __init__(self) -> None:
        self.commit, self.copies, self.stops = 0, 0, list[str]()
        self.raises: TrainingError | None = None
        self.failure: TrainingError | None = None

    def snapshot(self) -> Snapshot:
        if self.raises is not None:
            raise self.raises
        self.copies += 1
        parameters = np.full(3, self.commit, np.float32)
        return Snapshot(self.commit, parameters, b"%d" % self.commit, ())

    def request_stop(self, reason: str) -> None:
        self.stops.append(reason)


class Bench:
    """A listener with a fake controller, and two partitions whose epochs the test ends."""

    def __init__(self, rule: EarlyStopping | None, first_epoch: int = 0) -> None:
        self.master = Master()
        self.watch = EarlyStoppingListener(cast(MasterThread, self.master), rule)
        spec = FitSpec(workers=2, epochs=9, n_params=3, version="1", first_epoch=first_epoch)
        self.events = FitEvents(spec, [self.watch])
        self.logs = [EpochLog(0, 10), EpochLog(1, 11)]

    def finish(self, partition: int, *losses: float) -> None:
        """End one epoch of the partition for each of these held-out losses."""
        log = self.logs[partition]
        for loss in losses:
            epoch = len(log.report()["epochs"])
            log.add(PartitionEpoch(epoch, 1.0, 2, 2 * loss, 2.0))

    def look(self, training: tuple[int, ...] = (0, 1), phase: Phase = Phase.RUNNING) -> None:
        """Dispatch the progress of one poll, after one more commit."""
        self.master.commit += 1
        stats = {
            node: WorkerCounters(
                TrainingCounters(
                    node,
                    10 + node,
                    last_loss_sum=1.0,
                    last_loss_weight=2.0,
                    epochs=log.recent_figures(),
                )
            )
            for node, log in enumerate(self.logs)
        }
        known = frozenset(training)
        self.events.dispatch(Progress(phase, len(training), 2, 2, 0, 0, 0, 0.0, stats, known))


def test_epoch_is_judged_after_slowest_partition_ends_it() -> None:
    """An epoch is judged once both partitions have ended it; only the best epoch is copied."""
    made = Bench(EarlyStopping(patience=2))
    made.finish(0, *LOSSES)
    made.look()
    assert (made.master.copies, made.watch.best) == (0, None)
    made.finish(1, *LOSSES[:2])
    made.look()
    assert made.watch.best == Best(2, "loss", 3.0, commit=2)
    assert made.watch.copy.parameters.tolist() == [2, 2, 2]
    assert made.watch.copy.buffers == b"2"
    assert made.master.copies == 1  # two epochs in one poll, each the best so far


def test_early_stopping_without_held_out_rows_is_refused() -> None:
    """Without held-out rows a rule is refused, as it would stop any fit after some epochs."""
    made = Bench(EarlyStopping(patience=2))
    for log in made.logs:
        log.add(PartitionEpoch(0, 1.0, 2, 0.0, 0.0))
    with pytest.raises(UsageError, match=r"no held-out rows to measure: validation selects none"):
        made.look()
    without = Bench(None)
    without.logs = made.logs
    without.look()


def test_listener_requests_stop_once_and_keeps_best_epoch() -> None:
    """After ``patience`` worse epochs a stop is requested once, and the best epoch is kept."""
    made = Bench(EarlyStopping(patience=2), first_epoch=10)
    for loss in LOSSES:
        made.finish(0, loss)
        made.finish(1, loss)
        made.look()
    assert made.master.stops == [
        "early stopping: loss of the held-out rows was best in epoch 12 (3), 2 epochs ago"
    ]
    assert made.watch.best == Best(12, "loss", 3.0, commit=2)


def test_best_epoch_is_copied_later_after_failed_snapshot() -> None:
    """If no snapshot is possible, as without a media driver, the best epoch is copied later."""
    made = Bench(EarlyStopping(patience=2))
    made.master.raises = TrainingError("the master did not copy its parameters within 60 s")
    for partition in (0, 1):
        made.finish(partition, 3.0)
    made.look()
    assert (made.watch.best, made.watch.copy) == (None, None)
    made.master.raises = None
    made.look()
    made.look()
    assert made.watch.best == Best(1, "loss", 3.0, commit=2)
    assert made.master.copies == 1


def test_snapshot_error_of_failed_fit_is_raised() -> None:
    """If a snapshot fails because the fit has failed, the error is raised."""
    made = Bench(EarlyStopping(patience=2))
    made.master.raises = made.master.failure = TrainingError("the master failed")
    for partition in (0, 1):
        made.finish(partition, 3.0)
    with pytest.raises(TrainingError, match="the master failed"):
        made.look()


def test_epoch_does_not_wait_for_partition_without_worker() -> None:
    """An epoch does not wait for a partition that has no worker."""
    made = Bench(EarlyStopping(patience=1))
    made.finish(0, 1.0, 2.0)
    made.look(training=(0,))
    assert len(made.master.stops) == 1


def test_epochs_complete_after_workers_left_are_judged() -> None:
    """Epochs complete after all workers have left are judged, but do not stop the finished fit."""
    made = Bench(EarlyStopping(patience=1))
    made.finish(0, 3.0)
    made.finish(1, 3.0)
    made.look()
    made.finish(0, 1.0)
    made.finish(1, 1.0)
    made.look(training=(), phase=Phase.DONE)
    assert made.watch.best == Best(2, "loss", 1.0, commit=2)
    assert made.master.stops == []


def test_no_stop_is_requested_while_draining() -> None:
    """No stop is requested of a fit that is already draining."""
    made = Bench(EarlyStopping(patience=1))
    for partition in (0, 1):
        made.finish(partition, 1.0, 2.0)
    made.look(phase=Phase.DRAINING)
    assert made.watch.best == Best(1, "loss", 1.0, commit=1)
    assert made.master.stops == []


def test_a_worker_under_a_new_id_continues_its_losses() -> None:
    """A worker that returns under a new node id continues its counters of examples and losses."""
    losses = MinibatchLosses()

    def look(node: int, weight: float, loss_sum: float) -> dict[int, float]:
        counters = WorkerCounters(TrainingCounters(0, 7, loss_sum=loss_sum, loss_weight=weight))
        stats = {node: counters}
        return losses.collect_new_losses(Progress(Phase.RUNNING, 1, 1, 1, 0, 0, 0, 0.0, stats))

    assert look(1, weight=10.0, loss_sum=50.0) == {1: 5.0}
    assert look(3, weight=20.0, loss_sum=60.0) == {3: 1.0}


def test_keep_best_false_copies_no_parameters() -> None:
    """With keep_best=False the best epoch is recorded, and its parameters are not copied."""
    made = Bench(EarlyStopping(patience=1, keep_best=False))
    made.finish(0, 3.0)
    made.finish(1, 3.0)
    made.look()
    assert made.watch.best == Best(1, "loss", 3.0, commit=None)
    assert made.master.copies == 0


def test_no_epoch_is_judged_without_early_stopping() -> None:
    made = Bench(None)
    made.finish(0, 1.0, 2.0, 3.0)
    made.finish(1, 2.0, 2.0, 3.0)
    made.look()
    assert (made.watch.best, made.master.copies, made.master.stops) == (None, 0, [])


class Unmeasured:
    """A model without a loss."""


@pytest.mark.parametrize(
    ("model", "validation", "rule", "reason"),
    [
        (DenseNetwork([2, 2]), None, EarlyStopping(), "needs held-out rows"),
        (DenseNetwork([2, 2]), 0.1, 3, "early_stopping=3: must be None or a rule"),
        (Unmeasured(), 0.1, None, r"a Unmeasured lacks loss\(batch\)"),
    ],
)
def test_check_validation_rejects_unusable_rule_or_model(
    model: Any, validation: Any, rule: Any, reason: str
) -> None:
    """A rule without held-out rows, a wrong rule and a model without a loss are refused."""
    with pytest.raises(UsageError, match=reason):
        check_validation(model, validation, rule)


def test_accuracy_metric_needs_no_loss() -> None:
    """A model that only predicts can be judged by accuracy, and is refused for its loss."""

    class Predicting:
        outputs = "probabilities"

        def predict(self, features: Any) -> Any:
            return features

        def loss(self, batch: Any) -> tuple[float, float]:
            return self.need_loss()

        def need_loss(self) -> NoReturn:
            raise UsageError("created without a loss")

    check_validation(cast(Any, Predicting()), 0.1, EarlyStopping(metric="accuracy"))
    with pytest.raises(UsageError, match="created without a loss"):
        check_validation(cast(Any, Predicting()), 0.1, EarlyStopping(metric="loss"))


@pytest.mark.parametrize(("rule", "kept"), [(EarlyStopping(patience=2), True), (None, False)])
def test_saved_best_epoch_is_kept_only_with_early_stopping(
    rule: EarlyStopping | None, kept: bool
) -> None:
    """After a resume, the checkpoint's best epoch is used only if early stopping is."""
    made, best = Bench(rule), Best(2, "loss", 3.0, commit=7)
    made.watch.resume([], (best, made.master.snapshot()))
    assert (made.watch.best == best) is kept
    assert (made.watch.copy is not None) is kept


def test_unknown_held_out_weight_is_accepted_but_zero_refused() -> None:
    """A rule accepts NaN as the held-out weight, which a resumed epoch may have, but refuses 0."""
    bench = Bench(EarlyStopping(patience=3))
    bench.watch.on_epoch(Epoch(1, 0.5, 10, float("nan"), 2, held_weight=float("nan")))
    assert bench.master.stops == []
    with pytest.raises(UsageError, match="no held-out rows to measure"):
        bench.watch.on_epoch(Epoch(2, 0.5, 10, float("nan"), 2))
