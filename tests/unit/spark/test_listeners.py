"""Tests of a fit's events: every change is dispatched once, in a fixed order."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pytest

from sparkstrom.base.errors import TrainingError
from sparkstrom.codec.messages import Phase
from sparkstrom.fit import supervisor as fitting
from sparkstrom.fit.events import FinishedFit, FitEvents, FitListener
from sparkstrom.fit.listeners import ProgressListener
from sparkstrom.fit.supervisor import FitCancelled, FitSupervisor
from sparkstrom.observe.epoch_history import RECENT_EPOCHS_MAX, Epoch, EpochLog, PartitionEpoch
from sparkstrom.observe.progress import ProgressDisplay, ProgressFigures
from sparkstrom.observe.telemetry import TrainingCounters, WorkerCounters
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.runtime.master_control import FitOutcome, Progress, WorkerLogLine
from sparkstrom.runtime.master_thread import MasterThread
from sparkstrom.spark.jobs import SparkJob
from tests.unit.spark.test_summary import outcome

SPEC = FitSpec(workers=2, epochs=5, n_params=3, version="1", first_epoch=10)
START = Progress(Phase.GATHERING, 0, 2, 0, 0, 0, 0, 0.0, {})
BOTH = frozenset({0, 1})


class RecordingListener(FitListener):
    """A listener that records events in short form; progress only if requested."""

    def __init__(self, *, progress: bool = False) -> None:
        self.told: list[Any] = []
        self._progress = progress

    def on_fit_begin(self, spec: FitSpec) -> None:
        self.told.append(spec)

    def on_phase(self, phase: Phase) -> None:
        self.told.append(phase)

    def on_worker_change(self, training: frozenset[int]) -> None:
        self.told.append(training)

    def on_counters(self, counters: Mapping[int, WorkerCounters]) -> None:
        self.told.append(sorted(counters))

    def on_epoch(self, epoch: Epoch) -> None:
        self.told.append((epoch.epoch, epoch.validation))

    def on_progress(self, progress: Progress) -> None:
        if self._progress:
            self.told.append(progress)

    def on_fit_end(self, end: FinishedFit) -> None:
        self.told.append(end)

    def news(self) -> list[Any]:
        """Return the events since the last call."""
        told, self.told = self.told, []
        return told


@pytest.fixture
def heard() -> RecordingListener:
    return RecordingListener()


@pytest.fixture
def events(heard: RecordingListener) -> FitEvents:
    return FitEvents(SPEC, [heard])


def make_epoch_log(partition: int, *losses: float) -> EpochLog:
    """Return a partition's log, with one epoch for each held-out loss."""
    log = EpochLog(partition, 7)
    for epoch, loss in enumerate(losses):
        log.add(PartitionEpoch(epoch, 1.0, 2, 2 * loss, 2.0))
    return log


def told(*logs: EpochLog) -> dict[int, WorkerCounters]:
    """Return the counters of the nodes 0, 1, ..., with the epochs of their logs."""
    return {
        node: WorkerCounters(TrainingCounters(node, 7, epochs=log.recent_figures()))
        for node, log in enumerate(logs)
    }


def test_begin_dispatches_fit_spec(events: FitEvents, heard: RecordingListener) -> None:
    """``begin`` dispatches the start of the fit, with its spec."""
    events.begin()
    assert heard.news() == [SPEC]


def test_events_of_one_poll_have_fixed_order(heard: RecordingListener) -> None:
    """The events of one poll come in this order: phase, workers, counters, epoch, progress."""
    heard = RecordingListener(progress=True)
    stats = told(make_epoch_log(0, 5.0), make_epoch_log(1, 3.0))
    running = replace(START, phase=Phase.RUNNING, training=BOTH, stats=stats)
    FitEvents(SPEC, [heard]).dispatch(running)
    assert heard.told == [Phase.RUNNING, BOTH, [0, 1], (11, 4.0), running]


def test_only_changes_since_previous_poll_are_dispatched(
    events: FitEvents, heard: RecordingListener
) -> None:
    """Only what changed since the previous poll is dispatched."""
    events.dispatch(START)
    assert heard.news() == [Phase.GATHERING, frozenset(), []]
    events.dispatch(replace(START, minibatches=5, commits=4))
    assert heard.news() == []
    events.dispatch(replace(START, training=BOTH))
    assert heard.news() == [BOTH]
    events.dispatch(replace(START, training=BOTH, stats=told(make_epoch_log(0))))
    assert heard.news() == [[0]]


def test_epoch_is_dispatched_once_when_slowest_partition_completes(
    events: FitEvents, heard: RecordingListener
) -> None:
    """An epoch is dispatched once, when the slowest partition has completed it."""
    ahead = replace(
        START, training=BOTH, stats=told(make_epoch_log(0, 1.0, 2.0, 3.0), make_epoch_log(1))
    )
    events.dispatch(ahead)
    assert heard.news()[-1] == [0, 1]
    events.dispatch(
        replace(ahead, stats=told(make_epoch_log(0, 1.0, 2.0, 3.0), make_epoch_log(1, 3.0, 4.0)))
    )
    assert heard.news() == [[0, 1], (11, 2.0), (12, 3.0)]
    events.dispatch(
        replace(
            ahead, stats=told(make_epoch_log(0, 1.0, 2.0, 3.0), make_epoch_log(1, 3.0, 4.0, 5.0))
        )
    )
    assert heard.news() == [[0, 1], (13, 4.0)]


def test_epoch_waits_for_partition_that_only_evaluates(
    events: FitEvents, heard: RecordingListener
) -> None:
    """An epoch waits for a partition that only evaluates held-out rows, until it leaves."""
    some, measures = frozenset({0}), frozenset({1})
    trained = replace(START, training=some, evaluating=measures, stats=told(make_epoch_log(0, 1.0)))
    events.dispatch(trained)
    assert heard.news()[-1] == [0]
    events.dispatch(replace(trained, stats=told(make_epoch_log(0, 1.0), make_epoch_log(1, 3.0))))
    assert heard.news() == [[0, 1], (11, 2.0)]
    events.dispatch(
        replace(trained, stats=told(make_epoch_log(0, 1.0, 4.0), make_epoch_log(1, 3.0)))
    )
    assert heard.news() == [[0, 1]]
    events.dispatch(
        replace(trained, evaluating=frozenset(), stats=told(make_epoch_log(0, 1.0, 4.0)))
    )
    assert heard.news() == [[0], (12, 4.0)]  # partition 1 has left


def test_epoch_is_dispatched_if_slowest_partition_leaves(
    events: FitEvents, heard: RecordingListener
) -> None:
    """An epoch is dispatched if the partition that had not completed it leaves."""
    both = replace(START, training=BOTH, stats=told(make_epoch_log(0, 1.0), make_epoch_log(1)))
    events.dispatch(both)
    heard.news()
    events.dispatch(replace(both, training=frozenset({0})))
    assert heard.news() == [frozenset({0}), (11, 1.0)]


def test_last_epochs_are_dispatched_after_all_workers_left(
    events: FitEvents, heard: RecordingListener
) -> None:
    """The last epochs are dispatched although no worker is left."""
    events.dispatch(replace(START, training=BOTH, stats=told(make_epoch_log(0), make_epoch_log(1))))
    heard.news()
    events.dispatch(
        replace(START, phase=Phase.DONE, stats=told(make_epoch_log(0, 1.0), make_epoch_log(1, 3.0)))
    )
    assert heard.news() == [Phase.DONE, frozenset(), [0, 1], (11, 2.0)]


def test_fit_end_has_complete_epoch_history(events: FitEvents, heard: RecordingListener) -> None:
    """The end has all epochs of the tasks' reports; a stopped fit counts only complete ones."""
    done = outcome(stop_reason=None)
    reports = [
        json.dumps({"epochs": make_epoch_log(p, *map(float, range(3))).report()}) for p in (0, 1)
    ]
    events.end(done, reports)
    (end,) = heard.news()
    assert (end.spec, end.outcome, end.reports) == (SPEC, done, reports)
    assert [(one.epoch, one.validation, one.loss) for one in end.history] == [
        (11, 0.0, 0.5),
        (12, 1.0, 0.5),
        (13, 2.0, 0.5),
    ]
    assert end.epochs_trained == 5
    assert replace(end, outcome=outcome(stop_reason="enough")).epochs_trained == 3
    assert replace(end, outcome=outcome(stop_reason="soon"), history=[]).epochs_trained == 0


def test_epochs_missing_in_counters_are_dispatched_at_fit_end() -> None:
    """Listeners get epochs that were missing in the counters at the end of the fit, in order.

    Counters contain only the newest epochs. A listener with a ``live_option`` gets these at once.
    No listener gets figures of only some partitions.
    """
    heard, live = RecordingListener(), RecordingListener()
    live.live_option = "early_stopping"
    events = FitEvents(SPEC, [heard, live])
    logs = [make_epoch_log(p, *map(float, range(RECENT_EPOCHS_MAX + 3))) for p in (0, 1)]
    events.dispatch(replace(START, training=BOTH, stats=told(*logs)))
    assert not [one for one in heard.news() if isinstance(one, tuple)]
    assert next(one[0] for one in live.news() if isinstance(one, tuple)) == 11 + 3
    events.end(outcome(), [json.dumps({"epochs": log.report()}) for log in logs])
    assert [one[0] for one in heard.news() if isinstance(one, tuple)] == list(
        range(11, 14 + RECENT_EPOCHS_MAX)
    )
    assert not [one for one in live.news() if isinstance(one, tuple)]


def test_all_listeners_get_event_before_next_event() -> None:
    """All listeners get an event before any listener gets the next one."""
    told = list[Any]()
    one, other = RecordingListener(), RecordingListener()
    one.told = other.told = told
    FitEvents(SPEC, [one, other]).dispatch(START)
    assert told == [Phase.GATHERING] * 2 + [frozenset()] * 2 + [[]] * 2


class RecordingDisplay(ProgressDisplay):
    """A display that records what it is given to show."""

    def __init__(self) -> None:
        self.lines: list[tuple[ProgressFigures, bool]] = []

    def show(self, line: ProgressFigures, *, force: bool = False) -> None:
        self.lines.append((line, force))


def test_progress_display_updates_at_each_poll_and_at_end() -> None:
    """The display is updated at each poll until the fit is done, and once more at its end."""
    drawn = RecordingDisplay()
    events = FitEvents(SPEC, [ProgressListener(drawn)])
    events.begin()
    counters = TrainingCounters(0, examples=8, loss_sum=4.0, loss_weight=8.0)
    stats = {1: WorkerCounters(counters), 2: WorkerCounters(counters), 3: WorkerCounters()}
    half = replace(START, minibatches=5, minibatches_expected=10, stats=stats)
    events.dispatch(half)
    ((line, force),) = drawn.lines
    assert (line.epoch, line.epochs, line.loss, line.examples, force) == (2.5, 5, 0.5, 16, False)
    finished = replace(counters, last_loss_weight=4, last_loss_sum=1.0)
    done = replace(half, phase=Phase.DONE, stats={1: WorkerCounters(finished)})
    events.dispatch(done)
    assert len(drawn.lines) == 1
    events.end(outcome(), [])
    (line, force) = drawn.lines[-1]
    assert (line.phase, line.loss, force) == ("done", 0.25, True)


@pytest.mark.parametrize(("worker_lines", "shown"), [(True, 2), (False, 0)])
def test_worker_lines_are_not_shown_twice_in_terminal(worker_lines: bool, shown: int) -> None:
    """Workers' lines are not shown if the terminal already has them, as in Spark's local mode."""
    told: list[str] = []
    drawn = RecordingDisplay()
    drawn.say = told.append  # type: ignore[method-assign, assignment]
    events = FitEvents(SPEC, [ProgressListener(drawn, worker_lines=worker_lines)])
    events.begin()
    heard = (WorkerLogLine(0, "vm", "training", "printed"),)
    events.dispatch(replace(START, heard=heard, worker_lines_skipped=3))
    events.end(outcome(), [])
    assert len(told) == shown
    assert told[:1] == ["partition 0 on vm (training) says: printed"][:shown]


# -- the supervisor, which dispatches the events --------------------------------------------------


class Master:
    """A fake controller that has finished, or failed, at once."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure, self.progress = failure, replace(START, phase=Phase.DONE)
        self.finished = threading.Event()
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")
        self.finished.set()

    def acknowledge(self, progress: Progress) -> None:
        assert progress is self.progress

    def give_up(self, reason: str) -> None:
        self.calls.append(f"give up: {reason}")

    def end(self) -> None:
        self.calls.append("end")

    def outcome(self) -> FitOutcome:
        self.calls.append("outcome")
        return outcome()


class Job:
    """A fake Spark job whose tasks have returned."""

    running, reports, error = True, list[str](), None

    def start(self) -> None:
        """Do nothing."""

    def wait(self, seconds: float) -> bool:
        return True

    def cancel(self) -> None:
        """Do nothing."""

    def killed_for_memory(self) -> list[str]:
        return []


def run_fit(master: Master, *listeners: FitListener) -> None:
    """Run a fit with this controller, a fake job and these listeners."""
    events = FitEvents(SPEC, listeners)
    FitSupervisor(cast(MasterThread, master), cast(SparkJob, Job()), events).run()


def test_fit_end_is_dispatched_after_controller_end(heard: RecordingListener) -> None:
    """Listeners get the end of the fit after the controller has ended."""
    master = Master()

    class Last(FitListener):
        def on_fit_end(self, end: FinishedFit) -> None:
            master.calls.append("on_fit_end")

    run_fit(master, heard, Last())
    assert master.calls == ["start", "end", "outcome", "on_fit_end"]
    assert (heard.told[0], heard.told[1], heard.told[-1].spec) == (SPEC, Phase.DONE, SPEC)


def test_failed_fit_dispatches_no_fit_end(
    heard: RecordingListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listeners do not get the end of a fit that failed."""
    monkeypatch.setattr(fitting, "ABORT_NOTICE_S", 0.0)
    with pytest.raises(TrainingError, match="NaN"):
        run_fit(Master(TrainingError("NaN")), heard)
    assert heard.told == [SPEC]


def test_listener_exception_fails_fit_and_stops_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in a listener is raised by the fit, and the controller is stopped."""
    monkeypatch.setattr(fitting, "ABORT_NOTICE_S", 0.0)

    class Refusing(FitListener):
        def on_phase(self, phase: Phase) -> None:
            raise ValueError("no")

    master = Master()
    with pytest.raises(ValueError, match=r"^no$"):
        run_fit(master, Refusing())
    assert master.calls == ["start", "give up: ValueError", "end"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("Job 3 cancelled because killed via the Web UI", FitCancelled),
        ("Job 0 cancelled part of cancelled job group sparkstrom-1", FitCancelled),
        ("Job 12 was cancelled", FitCancelled),
        ("Job aborted due to stage failure: Task 0 was lost", TrainingError),
    ],
)
def test_cancelled_job_error_says_parameters_are_kept(
    monkeypatch: pytest.MonkeyPatch, words: str, error: type[TrainingError]
) -> None:
    """A cancelled job raises FitCancelled, whose message says that parameters are kept."""
    monkeypatch.setattr(fitting, "ABORT_NOTICE_S", 0.0)
    monkeypatch.setattr(fitting, "FAILURE_GRACE_S", 0.0)
    monkeypatch.setattr(fitting, "POLL_S", 0.0)
    monkeypatch.setattr(Job, "running", False)
    monkeypatch.setattr(Job, "error", RuntimeError(words))
    monkeypatch.setattr(Master, "start", lambda self: None)
    with pytest.raises(TrainingError) as caught:
        run_fit(Master())
    assert type(caught.value) is error
    assert ("network.parameters hold" in str(caught.value)) == (error is FitCancelled)
