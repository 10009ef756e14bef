"""The trainer with a scripted channel in place of its node: each directive, and each item."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sparkstrom.base.errors import PeerError, TrainingError
from sparkstrom.codec.messages import BUFFERS, Activity, Chunk, Commit, OptimizerRequest, Payload
from sparkstrom.codec.optimizer_state_codec import decode_state_untrusted, encode_state
from sparkstrom.encoding.update_sum import UpdateSum
from sparkstrom.observe.telemetry import WorkerCounters, to_wire
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.events_and_effects import Command, Directive
from sparkstrom.runtime.optimizer_states import decode_optimizer_state
from sparkstrom.runtime.theta import Theta, snapshot_chunk_count
from sparkstrom.runtime.training_loop import MergedCommits
from tests.unit.runtime.memories import make_theta
from tests.unit.runtime.trainer_harness import KEPT, TAU, TRAIN, K, N, Script, TrainerHarness, steps


def snapshot_chunks(theta: Theta) -> tuple[Chunk, ...]:
    """Return all chunks of a snapshot."""
    return tuple(theta.chunk(index) for index in range(snapshot_chunk_count(N)))


def reported_positions(events: list[ev.Event]) -> list[tuple[int, int, int]]:
    """Return the (epoch, batch, steps) that these events report."""
    return [
        (event.epoch, event.batch, event.steps)
        for event in events
        if isinstance(event, ev.UpdatePublished | ev.StepCompleted)
    ]


WHOLE = [(0, 1, 1), (0, 2, 2), (1, 0, 3), (1, 1, 4), (1, 2, 5), (2, 0, 6)]


def test_trainer_finishes_after_two_epochs_of_three_minibatches(
    make_trainer: Callable[..., TrainerHarness],
) -> None:
    """Two epochs of three minibatches are trained and published; then the trainer waits."""
    made = make_trainer(steps(9))
    events = made.run()
    assert reported_positions(events) == WHOLE
    assert all(
        isinstance(event, ev.UpdatePublished) for event in events if reported_positions([event])
    )
    assert events[0] == ev.ActivityChanged(Activity.STEPPING)
    assert events[-1] == ev.ActivityChanged(Activity.FINISHED)
    assert [batch.rows for batch in made.model.seen] == [4, 4, 2] * 2
    assert made.trainer.counts.examples == 20
    assert made.trainer.counts.loss_sum == 4 * (1 + 2 + 4 + 5) + 2 * (3 + 6)
    assert made.trainer.counts.last_loss_sum == 4 * (4 + 5) + 2 * 6
    assert (made.trainer.counts.loss_weight, made.trainer.counts.last_loss_weight) == (20, 10)
    assert made.channel.waits == 3


def test_step_without_update_is_reported_as_progress(
    make_trainer: Callable[..., TrainerHarness],
) -> None:
    """A step after which nothing reached tau is reported as progress."""
    events = make_trainer(steps(6), push=TAU / 2).run()
    told = [type(event) for event in events if reported_positions([event])]
    assert told == [ev.StepCompleted, ev.UpdatePublished] * 3


@pytest.mark.parametrize("publish_every", [2, 4, 100])
def test_trainer_publishes_every_n_steps_and_after_last_step(
    make_trainer: Callable[..., TrainerHarness], publish_every: int
) -> None:
    """Updates are published every ``publish_every`` steps and after the last step."""
    events = make_trainer(steps(6), publish_every=publish_every).run()
    published = [event.steps for event in events if isinstance(event, ev.UpdatePublished)]
    assert published == sorted({*range(publish_every, 7, publish_every), 6})
    # Reported positions exclude unpublished steps: a replacement worker would repeat them.
    sent = [(0, 0), *[WHOLE[step - 1][:2] for step in published]]
    newest = [sent[sum(step <= now for step in published)] for now in range(1, 7)]
    assert [position[:2] for position in reported_positions(events)] == newest


def test_publish_marks_last_update_of_worker(
    make_trainer: Callable[..., TrainerHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``Replica.publish`` gets ``is_last=True`` for the worker's last update."""
    made, asked = make_trainer(steps(6), publish_every=2), []
    publish = made.replica.publish
    monkeypatch.setattr(made.replica, "publish", lambda **given: asked.append(given) or publish())
    made.run()
    assert asked == [{"is_last": is_last} for is_last in (False, False, True)]


def test_worker_without_rows_finishes_without_step(
    make_trainer: Callable[..., TrainerHarness],
) -> None:
    """A worker without rows reports that it has finished, and takes no step."""
    install = ev.InstallSnapshot(snapshot_chunks(make_theta(N, K)), (), (), 0)
    made = make_trainer([([install], Directive(Command.PAUSE, number=1)), *steps(2)], rows=0)
    assert ev.ActivityChanged(Activity.FINISHED) in made.run()
    assert made.model.seen == []


def test_worker_with_initial_replica_adds_granted_residuals(
    make_trainer: Callable[..., TrainerHarness],
) -> None:
    """A worker with the initial replica adds granted residuals and reports that it is installed."""
    admitted = ev.IdAssigned(5, epoch=0, batch=0, steps=0, grants=("a",), returned=False)
    wait = Directive(Command.WAIT)
    made = make_trainer([([admitted], wait), ([ev.UseInitialReplica()], wait), *steps(1)])
    events = made.run()
    said = [event for event in events if not isinstance(event, ev.CommitApplied)]
    assert said[:2] == [
        ev.ReplicaInstalled(),
        ev.ActivityChanged(Activity.WAITING),
    ]  # no longer catching up
    assert made.granted == [("a",)]


def test_trainer_waits_after_steps_max_until_more_are_allowed(
    make_trainer: Callable[..., TrainerHarness],
) -> None:
    """The trainer waits after ``steps_max`` steps until a directive allows more."""
    events = make_trainer([*steps(4, Directive(Command.TRAIN, steps_max=2)), *steps(1)]).run()
    assert reported_positions(events) == WHOLE[:3]
    said = [event for event in events if isinstance(event, ev.ActivityChanged)]
    assert [busy.activity for busy in said] == [
        Activity.STEPPING,
        Activity.WAITING,
        Activity.STEPPING,
    ]


def test_trainer_starts_at_position_assigned_with_id(
    make_trainer: Callable[..., TrainerHarness],
) -> None:
    """The trainer starts at the position and step count that came with its id."""
    admitted = ev.IdAssigned(5, epoch=1, batch=1, steps=40, grants=(), returned=False)
    events = make_trainer([([admitted], TRAIN), *steps(3)]).run()
    assert reported_positions(events) == [(1, 2, 41), (2, 0, 42)]


def test_returned_worker_keeps_position_and_gets_no_residuals(
    make_trainer: Callable[..., TrainerHarness],
) -> None:
    """A worker that gets a new id after a return keeps its position and gets no residuals."""
    back = ev.IdAssigned(6, epoch=0, batch=0, steps=0, grants=("x",), returned=True)
    made = make_trainer([*steps(2), ([back], TRAIN)])
    assert reported_positions(made.run()) == WHOLE[:3]
    assert made.granted == []


def test_pause_is_answered_once_and_first_snapshot_adds_residuals(
    make_trainer: Callable[..., TrainerHarness],
) -> None:
    """A pause is answered once; the first installed snapshot adds the granted residuals."""
    server = make_theta(N, K)
    server.load(np.full(N, 2.0, np.float32))
    admitted = ev.IdAssigned(5, epoch=0, batch=0, steps=0, grants=("a", "b"), returned=False)
    install = ev.InstallSnapshot(snapshot_chunks(server), (), (), 3)
    pause = Directive(Command.PAUSE, number=1)
    again = (
        [ev.InstallSnapshot(snapshot_chunks(server), (), (), 3)],
        Directive(Command.WAIT),
    )  # adds no residuals again
    script: Script = [([admitted], pause), ([], pause), ([install], Directive(Command.WAIT)), again]
    made = make_trainer([*script, *steps(1)])
    events = made.run()
    assert events.count(ev.TrainerPaused(1)) == 1
    assert events.index(ev.TrainerPaused(1)) < events.index(ev.ReplicaInstalled())
    assert made.granted == [("a", "b")]
    assert made.replica.theta.commit == 3
    assert made.replica.theta.to_host()[0] == 2.0 + TAU
    installed = events.index(ev.ReplicaInstalled())
    assert events[installed + 1] == ev.ActivityChanged(Activity.WAITING)  # no longer catching up
    assert not any(isinstance(event, ev.ActivityChanged) for event in events[:installed])


def test_pause_with_new_number_is_answered_again(
    make_trainer: Callable[..., TrainerHarness],
) -> None:
    """A pause with another number is answered again."""
    script: Script = [([], Directive(Command.PAUSE, number=number)) for number in (1, 1, 2)]
    assert make_trainer(script).run() == [ev.TrainerPaused(1), ev.TrainerPaused(2)]


def test_updates_of_other_workers_are_applied_between_steps(
    make_trainer: Callable[..., TrainerHarness], make_commit: Callable[..., Commit]
) -> None:
    merged = MergedCommits(UpdateSum.of_array(np.full(N, 1024, np.int32)), 7, 0)
    made = make_trainer([*steps(1), ([ev.ApplyCommit(make_commit(6, 1)), merged], TRAIN)])
    events = made.run()
    seen = [event.seen for event in events if isinstance(event, ev.UpdatePublished)]
    assert seen == [0, 7]
    assert made.replica.theta.to_host()[[0, 1]].tolist() == [1 + 3 * TAU, 1 + 2 * TAU]


def test_commit_is_in_theta_when_reported_as_applied(make_trainer: Any, make_commit: Any) -> None:
    """When a commit is reported as applied, its update is already in theta."""
    made = make_trainer(
        [([ev.ApplyCommit(make_commit(n, n)) for n in (1, 2)], Directive(Command.WAIT))]
    )
    post, had = made.channel.post, {}
    theta = made.replica.theta
    made.channel.post = lambda event: (had.update({event: theta.to_host()[1]}), post(event))
    made.run()
    assert had[ev.CommitApplied(2)] == TAU


def test_drain_and_audit_are_each_answered_once(
    make_trainer: Callable[..., TrainerHarness],
) -> None:
    """A drain and an audit are each answered once, the audit with the hash and saved residual."""
    made = make_trainer(
        [
            *steps(6),
            *steps(2, Directive(Command.DRAIN)),
            *steps(2, Directive(Command.AUDIT, commit=6)),
        ]
    )
    events = made.run()
    digest = made.replica.theta.digest()
    assert [e for e in events if isinstance(e, ev.TrainerDrained | ev.ReplicaHashed)] == [
        ev.TrainerDrained(),
        ev.ReplicaHashed(6, digest, KEPT),
    ]
    assert made.channel.stats.steps == 6
    assert made.channel.stats.residual_square == 0.0
    assert made.channel.stats.tau == TAU


def test_counters_with_residual_norm_survive_waiting_after_end(
    make_trainer: Callable[..., TrainerHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counters with the residual's norm are not replaced by later ones while the trainer waits."""
    monkeypatch.setattr(
        "sparkstrom.runtime.trainer_thread.COUNTERS_INTERVAL_S", 0.0
    )  # a report is always due
    made = make_trainer(
        [
            *steps(6),
            *steps(2, Directive(Command.DRAIN)),
            *steps(3, Directive(Command.AUDIT, commit=6)),
        ]
    )
    made.run()
    assert made.channel.stats.residual_square == 0.0


def test_drain_directive_stops_training_early(make_trainer: Callable[..., TrainerHarness]) -> None:
    """A directive to drain ends training before all minibatches are trained."""
    events = make_trainer([*steps(2), *steps(3, Directive(Command.DRAIN))]).run()
    assert reported_positions(events) == WHOLE[:2]
    assert events[-1] == ev.ActivityChanged(Activity.WAITING)


def test_release_is_answered_once_with_saved_residual(
    make_trainer: Callable[..., TrainerHarness],
) -> None:
    """A release is answered once, with the file of the saved residual."""
    events = make_trainer(
        [*steps(6), *steps(2, Directive(Command.RELEASE, "a slot is needed"))]
    ).run()
    assert events.count(ev.TrainerReleased(KEPT)) == 1


def test_worker_released_before_replica_saves_granted_residuals(
    make_trainer: Callable[..., TrainerHarness],
) -> None:
    """A worker released before it has a replica adds and saves its granted residuals."""
    admitted = ev.IdAssigned(5, epoch=2, batch=0, steps=6, grants=("a",), returned=False)
    release = Directive(Command.RELEASE, "a slot is needed")
    made = make_trainer([([admitted], Directive(Command.PAUSE, number=1)), *steps(2, release)])
    assert made.run()[-1] == ev.TrainerReleased(KEPT)
    assert made.granted == [("a",)]


def test_fail_directive_raises_peer_error(make_trainer: Callable[..., TrainerHarness]) -> None:
    """A directive to fail raises PeerError with its reason."""
    made = make_trainer([*steps(1), ([], Directive(Command.FAIL, "nothing heard for 30 s"))])
    with pytest.raises(PeerError, match="nothing heard for 30 s"):
        made.trainer.run()


def test_nan_loss_fails_before_step_is_published(
    make_trainer: Callable[..., TrainerHarness],
) -> None:
    """A loss of NaN fails the task before the step is published."""
    made = make_trainer(steps(3))
    made.model.losses = {2: float("nan")}
    with pytest.raises(TrainingError, match="the loss is nan"):
        made.trainer.run()
    assert reported_positions(made.channel.posted()) == WHOLE[:1]


@pytest.mark.parametrize("shown", [True, False])
def test_show_residual_adds_residual_statistics_to_counters(
    make_trainer: Callable[..., TrainerHarness], shown: bool
) -> None:
    """The counters include statistics of the residual if ``show_residual`` is set."""
    made = make_trainer(
        [*steps(6), ([], Directive(Command.AUDIT, commit=6))], push=0.75 * TAU, show_residual=shown
    )
    made.run()
    stats = made.channel.stats
    assert (stats.residual is not None) is shown
    if shown:
        assert stats.residual.max == stats.residual.mean == 0.5 * TAU  # 6 x 0.75 tau - 4 x tau
        assert (stats.residual.tau, stats.residual.at_least_tau) == (TAU, 0)
    assert len(to_wire(WorkerCounters(stats))) < 60  # the wire takes 64, and the node adds some


def test_loss_and_examples_are_recorded_per_epoch(
    make_trainer: Callable[..., TrainerHarness],
) -> None:
    """The trainer records loss and examples of each epoch, with partition and attempt."""
    made = make_trainer(
        [*steps(6), ([], Directive(Command.AUDIT, commit=6))], partition=3, attempt=17
    )
    made.run()
    report = made.trainer.epochs.report()
    assert (report["partition"], report["attempt"]) == (3, 17)
    losses = [4 * (1 + 2) + 2 * 3, 4 * (4 + 5) + 2 * 6]
    assert [(one["epoch"], one["loss_sum"], one["examples"]) for one in report["epochs"]] == [
        (0, losses[0], 10),
        (1, losses[1], 10),
    ]
    assert made.channel.stats.epochs.finished == 1
    assert made.channel.stats.attempt == 17


# -- its own updates, buffers, and the updater's state -----------------------------------------


def test_own_commit_raises_commit_number_and_keeps_theta(
    make_trainer: Callable[..., TrainerHarness],
) -> None:
    """The commit of an own update raises the commit number and leaves theta unchanged."""
    made = make_trainer([*steps(2), ([ev.OwnCommitted(5)], TRAIN), ([ev.OwnCommitted(6)], TRAIN)])
    events = made.run()
    assert [event.seen for event in events if isinstance(event, ev.UpdatePublished)] == [0, 0, 5, 6]
    applied = [event.commit for event in events if isinstance(event, ev.CommitApplied)]
    assert applied == [5, 6]  # a neighbour may copy snapshots with these commits
    assert made.replica.theta.to_host()[0] == 4 * TAU


def test_installed_snapshot_commit_is_reported_as_applied(
    make_trainer: Callable[..., TrainerHarness],
) -> None:
    """After installing a snapshot, the trainer reports the snapshot's commit as applied."""
    server = make_theta(N, K)
    server.commit = 3
    made = make_trainer(
        [([ev.InstallSnapshot(snapshot_chunks(server), (), (), 3)], Directive(Command.WAIT))]
    )
    events = made.run()
    assert events.index(ev.ReplicaInstalled()) < events.index(ev.CommitApplied(3))


class StepCountBuffers:
    """The methods of a model whose buffers are its number of steps, as one byte."""

    seen: list[Any]
    loaded: bytes | None = None

    def buffers_bytes(self) -> bytes:
        return bytes([len(self.seen)])

    def load_buffers_bytes(self, buffers: bytes) -> None:
        self.loaded = buffers

    def average_buffers(self, reports: list[bytes]) -> bytes:
        return max(reports)


def test_buffers_are_published_before_last_update_of_epoch(
    constant_step_model: Callable[..., Any],
) -> None:
    """At an epoch's end, buffers are published before the update that completes the epoch."""
    model = type("Model", (StepCountBuffers, type(constant_step_model(N))), {})(N, TAU)
    made = TrainerHarness(model, steps(6))
    events = made.run()
    published = [event for event in events if isinstance(event, ev.UpdatePublished)]
    assert [(e.payload.form == BUFFERS, e.epoch, e.batch, e.steps) for e in published] == [
        (False, 0, 1, 1),
        (False, 0, 2, 2),
        (True, 0, 2, 2),
        (False, 1, 0, 3),
        (False, 1, 1, 4),
        (False, 1, 2, 5),
        (True, 1, 2, 5),
        (False, 2, 0, 6),
    ]
    assert [e.payload.data for e in published if e.payload.form == BUFFERS] == [
        bytes([3]),
        bytes([6]),
    ]


def test_buffers_in_flight_do_not_delay_last_update(
    constant_step_model: Callable[..., Any],
) -> None:
    """Buffers in flight do not delay the epoch's last update, which was due before them."""
    model = type("Model", (StepCountBuffers, type(constant_step_model(N))), {})(N, TAU)
    made = TrainerHarness(model, steps(4), publish_every=None)
    post, under_way = made.channel.post, Directive(Command.TRAIN, publishes=False)

    def answering(event: ev.Event) -> None:
        post(event)
        if isinstance(event, ev.UpdatePublished):
            made.channel.publish([], under_way)

    made.channel.post = answering  # type: ignore[method-assign]
    published = [event for event in made.run() if isinstance(event, ev.UpdatePublished)]
    assert [(e.payload.form == BUFFERS, e.steps) for e in published[2:4]] == [(True, 2), (False, 3)]


def test_averaged_buffers_replace_theta_buffers_not_model_buffers(
    constant_step_model: Callable[..., Any],
) -> None:
    """A commit of averaged buffers replaces theta's buffers, not the model's."""
    model = type("Model", (StepCountBuffers, type(constant_step_model(N))), {})(N, TAU)
    average = Commit(commit=4, origin=9, seq=1, payload=Payload(BUFFERS, 0, 0, b"average"))
    made = TrainerHarness(model, [([ev.ApplyCommit(average)], TRAIN)])
    assert ev.CommitApplied(4) in made.run()
    assert (made.replica.theta.commit, made.replica.theta.buffers) == (4, b"average")
    assert model.loaded is None


@pytest.mark.parametrize("lent", [True, False])
def test_received_optimizer_state_is_loaded_and_missing_one_counted(
    make_trainer: Callable[..., TrainerHarness], lent: bool
) -> None:
    """A received optimizer state is loaded; if none was received, ``fresh_updaters`` is 1."""
    state = {"mean": np.arange(3, dtype=np.float32), "steps": 7}
    content = encode_state({f"updater/{name}": value for name, value in state.items()})
    made = make_trainer([([ev.InstallOptimizer(content if lent else None)], TRAIN), *steps(5)])
    made.run()
    assert made.trainer.counts.fresh_updaters == (0 if lent else 1)
    assert bool(made.model.state) is lent
    if lent:
        np.testing.assert_array_equal(made.model.state["mean"], state["mean"])
        assert made.model.state["steps"] == 7


def test_requested_state_copy_is_made_at_batch_boundary(
    make_trainer: Callable[..., TrainerHarness],
) -> None:
    """A requested copy of optimizer and encoder state is made at a batch boundary."""
    made = make_trainer([*steps(2), ([], Directive(Command.WAIT))])
    made.model.state = {"steps": 3}
    ask = OptimizerRequest(8, None, 0)
    assert made.lender.chunk(ask) is None
    made.run()
    chunk = made.lender.chunk(ask)
    assert chunk is not None
    assert decode_optimizer_state(chunk.payload) == {"steps": 3}
    assert {"encoder/publications", "updater/steps"} <= set(decode_state_untrusted(chunk.payload))


@pytest.mark.parametrize(
    ("aggregation", "weight"), [("sum", 1.0), ("mean", 1 / 4), ("sqrt", 1 / 2)]
)
def test_update_weight_depends_on_aggregation_and_worker_count(
    make_trainer: Callable[..., TrainerHarness], aggregation: str, weight: float
) -> None:
    """With four workers, an update's weight is 1, 1/4 or 1/2, depending on the aggregation."""
    made = make_trainer(steps(1, Directive(Command.TRAIN, workers=4)))
    made.replica.encoder.aggregation = aggregation
    made.run()
    assert made.replica.encoder.scale == weight
