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
from tests.unit.runtime.benches import KEPT, TAU, TRAIN, Bench, K, N, Script, steps
from tests.unit.runtime.memories import make_theta


def whole(theta: Theta) -> tuple[Chunk, ...]:
    """Return all chunks of a snapshot."""
    return tuple(theta.chunk(index) for index in range(snapshot_chunk_count(N)))


def positions(events: list[ev.Event]) -> list[tuple[int, int, int]]:
    """Return the (epoch, batch, steps) that these events report."""
    return [
        (event.epoch, event.batch, event.steps)
        for event in events
        if isinstance(event, ev.UpdatePublished | ev.StepCompleted)
    ]


WHOLE = [(0, 1, 1), (0, 2, 2), (1, 0, 3), (1, 1, 4), (1, 2, 5), (2, 0, 6)]


def test_two_epochs_are_six_minibatches_and_then_it_is_finished(
    bench: Callable[..., Bench],
) -> None:
    """Two epochs of three minibatches are trained and published; then the trainer waits."""
    made = bench(steps(9))
    events = made.run()
    assert positions(events) == WHOLE
    assert all(isinstance(event, ev.UpdatePublished) for event in events if positions([event]))
    assert events[0] == ev.ActivityChanged(Activity.STEPPING)
    assert events[-1] == ev.ActivityChanged(Activity.FINISHED)
    assert [batch.rows for batch in made.model.seen] == [4, 4, 2] * 2
    assert made.trainer.counts.examples == 20
    assert made.trainer.counts.loss_sum == 4 * (1 + 2 + 4 + 5) + 2 * (3 + 6)
    assert made.trainer.counts.last_loss_sum == 4 * (4 + 5) + 2 * 6
    assert (made.trainer.counts.loss_weight, made.trainer.counts.last_loss_weight) == (20, 10)
    assert made.channel.waits == 3


def test_steps_that_send_nothing_are_told_as_progress(bench: Callable[..., Bench]) -> None:
    """A step after which nothing reached tau is reported as progress."""
    events = bench(steps(6), push=TAU / 2).run()
    told = [type(event) for event in events if positions([event])]
    assert told == [ev.StepCompleted, ev.UpdatePublished] * 3


@pytest.mark.parametrize("publish_every", [2, 4, 100])
def test_it_publishes_every_so_often_and_at_the_end(
    bench: Callable[..., Bench], publish_every: int
) -> None:
    """Updates are published every ``publish_every`` steps and after the last step."""
    events = bench(steps(6), publish_every=publish_every).run()
    published = [event.steps for event in events if isinstance(event, ev.UpdatePublished)]
    assert published == sorted({*range(publish_every, 7, publish_every), 6})
    # Reported positions exclude unpublished steps: a replacement worker would repeat them.
    sent = [(0, 0), *[WHOLE[step - 1][:2] for step in published]]
    newest = [sent[sum(step <= now for step in published)] for now in range(1, 7)]
    assert [position[:2] for position in positions(events)] == newest


def test_the_encoder_knows_a_workers_last_update(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``Replica.publish`` gets ``is_last=True`` for the worker's last update."""
    made, asked = bench(steps(6), publish_every=2), []
    publish = made.replica.publish
    monkeypatch.setattr(made.replica, "publish", lambda **given: asked.append(given) or publish())
    made.run()
    assert asked == [{"is_last": is_last} for is_last in (False, False, True)]


def test_no_rows_are_nothing_to_train(bench: Callable[..., Bench]) -> None:
    """A worker without rows reports that it has finished, and takes no step."""
    install = ev.InstallSnapshot(whole(make_theta(N, K)), (), (), 0)
    made = bench([([install], Directive(Command.PAUSE, number=1)), *steps(2)], rows=0)
    assert ev.ActivityChanged(Activity.FINISHED) in made.run()
    assert made.model.seen == []


def test_who_begins_with_a_replica_takes_its_grants_and_is_ready(
    bench: Callable[..., Bench],
) -> None:
    """A worker with the initial replica adds granted residuals and reports that it is installed."""
    admitted = ev.IdAssigned(5, epoch=0, batch=0, steps=0, grants=("a",), returned=False)
    wait = Directive(Command.WAIT)
    made = bench([([admitted], wait), ([ev.UseInitialReplica()], wait), *steps(1)])
    events = made.run()
    said = [event for event in events if not isinstance(event, ev.CommitApplied)]
    assert said[:2] == [
        ev.ReplicaInstalled(),
        ev.ActivityChanged(Activity.WAITING),
    ]  # no longer catching up
    assert made.granted == [("a",)]


def test_it_goes_no_further_than_it_may(bench: Callable[..., Bench]) -> None:
    """The trainer waits after ``steps_max`` steps until a directive allows more."""
    events = bench([*steps(4, Directive(Command.TRAIN, steps_max=2)), *steps(1)]).run()
    assert positions(events) == WHOLE[:3]
    said = [event for event in events if isinstance(event, ev.ActivityChanged)]
    assert [busy.activity for busy in said] == [
        Activity.STEPPING,
        Activity.WAITING,
        Activity.STEPPING,
    ]


def test_where_it_begins_is_the_masters_to_say(bench: Callable[..., Bench]) -> None:
    """The trainer starts at the position and step count that came with its id."""
    admitted = ev.IdAssigned(5, epoch=1, batch=1, steps=40, grants=(), returned=False)
    events = bench([([admitted], TRAIN), *steps(3)]).run()
    assert positions(events) == [(1, 2, 41), (2, 0, 42)]


def test_who_comes_back_goes_on_where_it_was(bench: Callable[..., Bench]) -> None:
    """A worker that gets a new id after a return keeps its position and gets no residuals."""
    back = ev.IdAssigned(6, epoch=0, batch=0, steps=0, grants=("x",), returned=True)
    made = bench([*steps(2), ([back], TRAIN)])
    assert positions(made.run()) == WHOLE[:3]
    assert made.granted == []


def test_a_pause_is_answered_once_and_a_replica_taken_with_its_grants(
    bench: Callable[..., Bench],
) -> None:
    """A pause is answered once; the first installed snapshot adds the granted residuals."""
    server = make_theta(N, K)
    server.load(np.full(N, 2.0, np.float32))
    admitted = ev.IdAssigned(5, epoch=0, batch=0, steps=0, grants=("a", "b"), returned=False)
    install = ev.InstallSnapshot(whole(server), (), (), 3)
    pause = Directive(Command.PAUSE, number=1)
    again = (
        [ev.InstallSnapshot(whole(server), (), (), 3)],
        Directive(Command.WAIT),
    )  # adds no residuals again
    script: Script = [([admitted], pause), ([], pause), ([install], Directive(Command.WAIT)), again]
    made = bench([*script, *steps(1)])
    events = made.run()
    assert events.count(ev.TrainerPaused(1)) == 1
    assert events.index(ev.TrainerPaused(1)) < events.index(ev.ReplicaInstalled())
    assert made.granted == [("a", "b")]
    assert made.replica.theta.commit == 3
    assert made.replica.theta.to_host()[0] == 2.0 + TAU
    installed = events.index(ev.ReplicaInstalled())
    assert events[installed + 1] == ev.ActivityChanged(Activity.WAITING)  # no longer catching up
    assert not any(isinstance(event, ev.ActivityChanged) for event in events[:installed])


def test_a_second_pause_is_answered_too(bench: Callable[..., Bench]) -> None:
    """A pause with another number is answered again."""
    script: Script = [([], Directive(Command.PAUSE, number=number)) for number in (1, 1, 2)]
    assert bench(script).run() == [ev.TrainerPaused(1), ev.TrainerPaused(2)]


def test_updates_of_others_are_applied_between_steps(
    bench: Callable[..., Bench], make_commit: Callable[..., Commit]
) -> None:
    merged = MergedCommits(UpdateSum.of_array(np.full(N, 1024, np.int32)), 7, 0)
    made = bench([*steps(1), ([ev.ApplyCommit(make_commit(6, 1)), merged], TRAIN)])
    events = made.run()
    seen = [event.seen for event in events if isinstance(event, ev.UpdatePublished)]
    assert seen == [0, 7]
    assert made.replica.theta.to_host()[[0, 1]].tolist() == [1 + 3 * TAU, 1 + 2 * TAU]


def test_what_it_says_it_has_applied_it_has(bench: Any, make_commit: Any) -> None:
    """When a commit is reported as applied, its update is already in theta."""
    made = bench([([ev.ApplyCommit(make_commit(n, n)) for n in (1, 2)], Directive(Command.WAIT))])
    post, had = made.channel.post, {}
    theta = made.replica.theta
    made.channel.post = lambda event: (had.update({event: theta.to_host()[1]}), post(event))
    made.run()
    assert had[ev.CommitApplied(2)] == TAU


def test_the_end_drain_audit_and_what_is_kept(bench: Callable[..., Bench]) -> None:
    """A drain and an audit are each answered once, the audit with the hash and saved residual."""
    made = bench(
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


def test_waiting_after_the_end_does_not_replace_the_last_figures(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counters with the residual's norm are not replaced by later ones while the trainer waits."""
    monkeypatch.setattr(
        "sparkstrom.runtime.trainer_thread.COUNTERS_INTERVAL_S", 0.0
    )  # a report is always due
    made = bench(
        [
            *steps(6),
            *steps(2, Directive(Command.DRAIN)),
            *steps(3, Directive(Command.AUDIT, commit=6)),
        ]
    )
    made.run()
    assert made.channel.stats.residual_square == 0.0


def test_draining_stops_training(bench: Callable[..., Bench]) -> None:
    """A directive to drain ends training before all minibatches are trained."""
    events = bench([*steps(2), *steps(3, Directive(Command.DRAIN))]).run()
    assert positions(events) == WHOLE[:2]
    assert events[-1] == ev.ActivityChanged(Activity.WAITING)


def test_a_released_worker_keeps_its_residual_and_says_so_once(
    bench: Callable[..., Bench],
) -> None:
    """A release is answered once, with the file of the saved residual."""
    events = bench([*steps(6), *steps(2, Directive(Command.RELEASE, "a slot is needed"))]).run()
    assert events.count(ev.TrainerReleased(KEPT)) == 1


def test_who_has_to_go_before_it_has_a_replica_keeps_what_it_was_granted(
    bench: Callable[..., Bench],
) -> None:
    """A worker released before it has a replica adds and saves its granted residuals."""
    admitted = ev.IdAssigned(5, epoch=2, batch=0, steps=6, grants=("a",), returned=False)
    release = Directive(Command.RELEASE, "a slot is needed")
    made = bench([([admitted], Directive(Command.PAUSE, number=1)), *steps(2, release)])
    assert made.run()[-1] == ev.TrainerReleased(KEPT)
    assert made.granted == [("a",)]


def test_a_failed_node_fails_the_task(bench: Callable[..., Bench]) -> None:
    """A directive to fail raises PeerError with its reason."""
    made = bench([*steps(1), ([], Directive(Command.FAIL, "nothing heard for 30 s"))])
    with pytest.raises(PeerError, match="nothing heard for 30 s"):
        made.trainer.run()


def test_a_loss_that_is_no_number_fails_before_anything_is_published(
    bench: Callable[..., Bench],
) -> None:
    """A loss of NaN fails the task before the step is published."""
    made = bench(steps(3))
    made.model.losses = {2: float("nan")}
    with pytest.raises(TrainingError, match="the loss is nan"):
        made.trainer.run()
    assert positions(made.channel.posted()) == WHOLE[:1]


@pytest.mark.parametrize("shown", [True, False])
def test_the_residuals_figures_are_among_the_counters_where_wanted(
    bench: Callable[..., Bench], shown: bool
) -> None:
    """The counters include statistics of the residual if ``show_residual`` is set."""
    made = bench(
        [*steps(6), ([], Directive(Command.AUDIT, commit=6))], push=0.75 * TAU, show_residual=shown
    )
    made.run()
    stats = made.channel.stats
    assert (stats.residual is not None) is shown
    if shown:
        assert stats.residual.max == stats.residual.mean == 0.5 * TAU  # 6 x 0.75 tau - 4 x tau
        assert (stats.residual.tau, stats.residual.at_least_tau) == (TAU, 0)
    assert len(to_wire(WorkerCounters(stats))) < 60  # the wire takes 64, and the node adds some


def test_each_epoch_is_written_down(bench: Callable[..., Bench]) -> None:
    """The trainer records loss and examples of each epoch, with partition and attempt."""
    made = bench([*steps(6), ([], Directive(Command.AUDIT, commit=6))], partition=3, attempt=17)
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


def test_own_updates_move_the_commit_and_nothing_else(bench: Callable[..., Bench]) -> None:
    """The commit of an own update raises the commit number and leaves theta unchanged."""
    made = bench([*steps(2), ([ev.OwnCommitted(5)], TRAIN), ([ev.OwnCommitted(6)], TRAIN)])
    events = made.run()
    assert [event.seen for event in events if isinstance(event, ev.UpdatePublished)] == [0, 0, 5, 6]
    applied = [event.commit for event in events if isinstance(event, ev.CommitApplied)]
    assert applied == [5, 6]  # a neighbour may copy snapshots with these commits
    assert made.replica.theta.to_host()[0] == 4 * TAU


def test_after_a_replica_it_says_what_it_holds(bench: Callable[..., Bench]) -> None:
    """After installing a snapshot, the trainer reports the snapshot's commit as applied."""
    server = make_theta(N, K)
    server.commit = 3
    made = bench([([ev.InstallSnapshot(whole(server), (), (), 3)], Directive(Command.WAIT))])
    events = made.run()
    assert events.index(ev.ReplicaInstalled()) < events.index(ev.CommitApplied(3))


class Statistics:
    """The methods of a model whose buffers are its number of steps, as one byte."""

    seen: list[Any]
    loaded: bytes | None = None

    def buffers_bytes(self) -> bytes:
        return bytes([len(self.seen)])

    def load_buffers_bytes(self, buffers: bytes) -> None:
        self.loaded = buffers

    def average_buffers(self, reports: list[bytes]) -> bytes:
        return max(reports)


def test_buffers_are_published_before_an_epochs_last_position(pushing: Callable[..., Any]) -> None:
    """At an epoch's end, buffers are published before the update that completes the epoch."""
    model = type("Model", (Statistics, type(pushing(N))), {})(N, TAU)
    made = Bench(model, steps(6))
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


def test_an_epochs_buffers_do_not_keep_its_last_update_back(pushing: Callable[..., Any]) -> None:
    """Buffers in flight do not delay the epoch's last update, which was due before them."""
    model = type("Model", (Statistics, type(pushing(N))), {})(N, TAU)
    made = Bench(model, steps(4), publish_every=None)
    post, under_way = made.channel.post, Directive(Command.TRAIN, publishes=False)

    def answering(event: ev.Event) -> None:
        post(event)
        if isinstance(event, ev.UpdatePublished):
            made.channel.publish([], under_way)

    made.channel.post = answering  # type: ignore[method-assign]
    published = [event for event in made.run() if isinstance(event, ev.UpdatePublished)]
    assert [(e.payload.form == BUFFERS, e.steps) for e in published[2:4]] == [(True, 2), (False, 3)]


def test_the_average_is_taken_and_the_models_own_go_on(pushing: Callable[..., Any]) -> None:
    """A commit of averaged buffers replaces theta's buffers, not the model's."""
    model = type("Model", (Statistics, type(pushing(N))), {})(N, TAU)
    average = Commit(commit=4, origin=9, seq=1, payload=Payload(BUFFERS, 0, 0, b"average"))
    made = Bench(model, [([ev.ApplyCommit(average)], TRAIN)])
    assert ev.CommitApplied(4) in made.run()
    assert (made.replica.theta.commit, made.replica.theta.buffers) == (4, b"average")
    assert model.loaded is None


@pytest.mark.parametrize("lent", [True, False])
def test_a_borrowed_state_is_taken_and_a_fresh_one_counted(
    bench: Callable[..., Bench], lent: bool
) -> None:
    """A received optimizer state is loaded; if none was received, ``fresh_updaters`` is 1."""
    state = {"mean": np.arange(3, dtype=np.float32), "steps": 7}
    content = encode_state({f"updater/{name}": value for name, value in state.items()})
    made = bench([([ev.InstallOptimizer(content if lent else None)], TRAIN), *steps(5)])
    made.run()
    assert made.trainer.counts.fresh_updaters == (0 if lent else 1)
    assert bool(made.model.state) is lent
    if lent:
        np.testing.assert_array_equal(made.model.state["mean"], state["mean"])
        assert made.model.state["steps"] == 7


def test_a_copy_of_its_state_is_made_between_two_steps(bench: Callable[..., Bench]) -> None:
    """A requested copy of optimizer and encoder state is made at a batch boundary."""
    made = bench([*steps(2), ([], Directive(Command.WAIT))])
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
def test_an_updates_weight_follows_how_many_train(
    bench: Callable[..., Bench], aggregation: str, weight: float
) -> None:
    """With four workers, an update's weight is 1, 1/4 or 1/2, depending on the aggregation."""
    made = bench(steps(1, Directive(Command.TRAIN, workers=4)))
    made.replica.encoder.aggregation = aggregation
    made.run()
    assert made.replica.encoder.scale == weight
