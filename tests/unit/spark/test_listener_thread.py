"""Tests of ListenerThread: the order of events, slow listeners, and listeners that raise."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sparkstrom import SharedTrainingMaster
from sparkstrom.base.errors import TrainingError, UsageError
from sparkstrom.base.identity import Position
from sparkstrom.codec.messages import Phase
from sparkstrom.fit.listeners import ListenerThread, check_listeners, make_listener_thread
from sparkstrom.listeners import (
    EpochEnd,
    FitBegin,
    FitEnd,
    Iteration,
    JsonLines,
    TrainingListener,
    WorkerChange,
)
from sparkstrom.models import DenseNetwork
from sparkstrom.observe.epoch_history import Epoch
from sparkstrom.observe.listener_events import read_run_log
from sparkstrom.observe.progress import ProgressDisplay
from sparkstrom.protocol.common.fit_spec import FitSpec, PartitionStart
from sparkstrom.protocol.master.members import Departure
from sparkstrom.runtime.master_control import Progress

SPEC = FitSpec(workers=2, epochs=3, n_params=4, version="1")
BEGIN = FitBegin("DenseNetwork", 4, 2, 3, 0, {})
START = Progress(Phase.RUNNING, 2, 2, 2, 0, 60, 0, 0.0, {}, frozenset({0, 1}))


class RecordingListener:
    """A listener without a base class, which records all events and the thread of the last."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.thread = ""

    def _add_news(self, event: Any) -> None:
        self.events.append(event)
        self.thread = threading.current_thread().name

    on_fit_begin = on_iteration = on_worker_change = on_epoch = on_fit_end = _add_news

    @property
    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.events]


class Summary:
    """A fake summary with only what ``ListenerThread.run_fit`` uses."""

    def __init__(self) -> None:
        self.warnings: list[str] = []


def make_thread(*listeners: Any, said: list[str] | None = None) -> ListenerThread:
    """Return a ListenerThread with these listeners; it appends its messages to ``said``."""
    return ListenerThread(
        listeners,
        BEGIN,
        SPEC,
        copy=lambda: "the copy",
        judge=lambda *rows: ("judged", *rows),
        say=(said if said is not None else []).append,
    )


def run(heard: ListenerThread, fit: Callable[[], None]) -> Any:
    """Run a fit whose training is the function ``fit``; return its summary."""

    def whole() -> Any:
        heard.on_fit_begin(SPEC)
        fit()
        return Summary()

    return heard.run_fit(whole)


def make_progress(minibatches: int, **changes: Any) -> Progress:
    """Return the progress after this number of minibatches."""
    return replace(START, minibatches=minibatches, **changes)


def test_listeners_get_events_in_order_on_listener_thread() -> None:
    diary, other = RecordingListener(), RecordingListener()
    heard = make_thread(diary, other)

    def fit() -> None:
        heard.on_progress(make_progress(1))
        heard.on_epoch(Epoch(1, 0.5, 100, 0.25, 2, held_weight=10.0))

    summary = run(heard, fit)
    assert diary.kinds == ["FitBegin", "WorkerChange", "Iteration", "EpochEnd", "FitEnd"]
    assert diary.events == other.events
    assert diary.thread == "sparkstrom-listeners"
    assert diary.events[0] == BEGIN
    assert diary.events[-1].summary is summary
    assert diary.events[-1].error is None


def test_workers_finished_between_polls_are_reported_as_joined() -> None:
    """Workers that join and finish between two progress reports are reported; their end is not."""
    diary = RecordingListener()
    heard = make_thread(diary)
    done = replace(
        START, phase=Phase.DONE, training=frozenset(), minibatches=60, started=frozenset({0, 1})
    )

    def fit() -> None:
        heard.on_progress(replace(START, training=frozenset({1})))
        heard.on_progress(done)
        heard.on_progress(done)

    run(heard, fit)
    changes = [event for event in diary.events if isinstance(event, WorkerChange)]
    assert [(each.joined, each.left) for each in changes] == [({1}, set()), ({0}, set())]
    assert changes[-1].training == {0, 1}


def test_epoch_end_copies_and_evaluates_on_request() -> None:
    """EpochEnd has no validation value if none is known; it copies and evaluates on request."""
    diary = RecordingListener()
    heard = make_thread(diary)

    def fit() -> None:
        heard.on_epoch(Epoch(4, 0.5, 100, 0.25, 2, held_weight=10.0))
        heard.on_epoch(Epoch(5, 0.5, 100, float("nan"), 2))
        heard.on_epoch(Epoch(6, 0.5, 100, float("nan"), 2, held_weight=float("nan")))

    run(heard, fit)
    with_rows, without, unknown = (e for e in diary.events if isinstance(e, EpochEnd))
    assert (with_rows.epoch, with_rows.loss, with_rows.validation) == (4, 0.5, 0.25)
    assert without.validation is None
    assert unknown.validation is None
    assert with_rows.snapshot() == "the copy"
    assert with_rows.evaluate("x", "y", "roc") == ("judged", "x", "y", "roc")


def test_slow_listener_gets_only_newest_iteration() -> None:
    """A listener that is busy during 50 iterations gets only the newest one."""
    went_in, may_go_on = threading.Event(), threading.Event()

    class Slow(RecordingListener):
        def on_fit_begin(self, event: FitBegin) -> None:
            went_in.set()
            assert may_go_on.wait(30)

    slow = Slow()
    heard = make_thread(slow)

    def fit() -> None:
        assert went_in.wait(30)
        for minibatches in range(1, 51):
            heard.on_progress(make_progress(minibatches))
        may_go_on.set()

    run(heard, fit)
    told = [event.minibatches for event in slow.events if isinstance(event, Iteration)]
    assert told == [50]


@pytest.mark.parametrize("resumed", [0, 7])
def test_no_iteration_event_before_first_committed_minibatch(resumed: int) -> None:
    """Before, the first event came at the start, so the time until the first step was training."""
    diary = RecordingListener()
    heard = make_thread(diary)
    starts = (PartitionStart(Position(0, resumed), 90, 1, 10), PartitionStart(Position(0, 0)))

    def fit() -> Any:
        heard.on_fit_begin(replace(SPEC, starts=starts))
        for minibatches in (0, resumed, resumed, resumed + 3):  # 0: a controller in a task
            heard.on_progress(make_progress(minibatches))
            heard.on_epoch(Epoch(1, 0.5, 100, 0.25, 2, held_weight=10.0))  # queues any iteration
        return Summary()

    heard.run_fit(fit)
    told = [event.minibatches for event in diary.events if isinstance(event, Iteration)]
    assert told == [resumed + 3]


def test_worker_changes_have_departure_reasons() -> None:
    """Listeners get the partitions that joined or left, and why, but not at the fit's end."""
    diary = RecordingListener()
    heard = make_thread(diary)
    lost = Departure(3, 1, "host-b", "silent for 10 s", 5.0)
    taken_over = Departure(4, 0, "host-a", "another attempt", 6.0)

    def fit() -> None:
        heard.on_progress(make_progress(1, training=frozenset({0, 1})))
        heard.on_progress(make_progress(2, training=frozenset({0}), departures=(lost,)))
        heard.on_progress(make_progress(3, training=frozenset({0, 1}), departures=(lost,)))
        heard.on_progress(make_progress(4, training=frozenset({0, 1}), departures=(lost,)))
        heard.on_progress(
            make_progress(5, training=frozenset({0, 1}), departures=(lost, taken_over))
        )
        heard.on_progress(
            make_progress(6, training=frozenset(), departures=(lost, taken_over), phase=Phase.DONE)
        )

    run(heard, fit)
    changes = [event for event in diary.events if isinstance(event, WorkerChange)]
    assert [(set(c.joined), set(c.left), c.reasons) for c in changes] == [
        ({0, 1}, set(), ()),
        (set(), {1}, ("partition 1 on host-b: silent for 10 s",)),
        ({1}, set(), ()),
        ({0}, {0}, ("partition 0 on host-a: another attempt",)),
    ]


@pytest.mark.parametrize("kind", [ValueError, SystemExit])
def test_listener_exception_fails_fit_and_names_method(kind: type[BaseException]) -> None:
    """An exception in a listener ends the fit with an error that names the listener's method."""
    called = threading.Event()

    class Broken(TrainingListener):
        def on_iteration(self, event: Iteration) -> None:
            called.set()
            raise kind("no such column")

    diary = RecordingListener()
    heard = make_thread(Broken(), diary)

    def fit() -> None:
        heard.on_progress(make_progress(1))
        assert called.wait(30)
        for minibatches in range(2, 100_000):  # the error is raised at one of the next polls
            heard.on_progress(make_progress(minibatches))

    name = f"listener Broken.on_iteration raised {kind.__name__}"
    wanted = f"^{re.escape(name)}: no such column; .* fails_fit"
    with pytest.raises(TrainingError, match=wanted) as caught:
        run(heard, fit)
    assert "Traceback" in caught.value.trace
    assert isinstance(caught.value.__cause__, kind)
    assert diary.events[-1] == FitEnd(None, diary.events[-1].error, diary.events[-1].seconds)
    assert diary.events[-1].error.startswith(name)


def test_fails_fit_false_listener_is_dropped_after_one_warning() -> None:
    """A listener with fails_fit = False that raises causes one warning and gets no more events."""

    class Broken(RecordingListener):
        fails_fit = False

        def on_worker_change(self, event: WorkerChange) -> None:
            raise OSError("disk full")

    broken, diary = Broken(), RecordingListener()
    said: list[str] = []
    heard = make_thread(broken, diary, said=said)
    summary = run(heard, lambda: heard.on_progress(START))
    assert broken.kinds == ["FitBegin"]
    assert diary.kinds[-1] == "FitEnd"
    wanted = "listener Broken.on_worker_change raised OSError: disk full; it gets no more"
    assert [text for text in said if wanted in text] == said != []
    assert wanted in summary.warnings[0]


@pytest.mark.parametrize(("method", "ends"), [("on_fit_begin", True), ("on_worker_change", False)])
def test_fails_fit_none_listener_fails_fit_only_in_on_fit_begin(method: str, ends: bool) -> None:
    """With ``fails_fit = None``, only an error in ``on_fit_begin`` ends the fit, in each fit."""

    class Broken(RecordingListener):
        fails_fit = None

    def fail(self: Any, event: Any) -> None:
        called.set()
        raise OSError("no server")

    def fit() -> None:
        for minibatches in range(1_000):  # the error is raised at one of the next polls
            heard.on_progress(make_progress(minibatches))
            assert called.wait(30)

    setattr(Broken, method, fail)
    broken, refused = Broken(), pytest.raises(TrainingError, match="raised OSError: no server")
    for _ in range(2):
        called, heard = threading.Event(), make_thread(broken)
        with refused if ends else contextlib.nullcontext():
            run(heard, fit)


def test_only_failing_one_of_equal_listeners_is_dropped() -> None:
    """Of two equal listeners, such as dataclasses, the one that raised gets no more events."""

    class Equal(RecordingListener):
        fails_fit = False

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Equal)

        __hash__ = None  # type: ignore[assignment]

    class Broken(Equal):
        def on_worker_change(self, event: WorkerChange) -> None:
            raise OSError("disk full")

    whole, broken = Equal(), Broken()
    heard = make_thread(whole, broken)
    run(heard, lambda: heard.on_progress(make_progress(1)))
    assert whole.kinds == ["FitBegin", "WorkerChange", "Iteration", "FitEnd"]
    assert broken.kinds == ["FitBegin"]


def test_unwritable_run_log_causes_only_warning(tmp_path: Path) -> None:
    """A run log that cannot be written causes one warning, and other listeners get all events."""
    (tmp_path / "file").write_text("")
    diary = RecordingListener()
    heard = make_thread(JsonLines(tmp_path / "file" / "run.jsonl"), diary)
    summary = run(heard, lambda: heard.on_progress(make_progress(1)))
    (warning,) = summary.warnings
    assert warning.startswith("listener JsonLines.on_fit_begin raised ")
    assert diary.kinds == ["FitBegin", "WorkerChange", "Iteration", "FitEnd"]


def test_a_listener_that_does_not_return_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the warning left open which of the listeners the fit no longer waits for."""
    went_in, may_go_on = threading.Event(), threading.Event()

    class Uploading(TrainingListener):
        def on_fit_begin(self, event: FitBegin) -> None:
            went_in.set()
            assert may_go_on.wait(30)

    monkeypatch.setattr("sparkstrom.fit.listeners.LISTENERS_END_S", 0.0)
    heard = make_thread(RecordingListener(), Uploading(), RecordingListener())
    run(heard, lambda: went_in.wait(30))
    text = "listeners are still busy 0 s after the end, in Uploading.on_fit_begin; not waiting"
    assert heard.warnings == [text]
    may_go_on.set()
    heard._thread.join(30)


def test_run_log_has_fit_end_if_listener_blocks_in_on_fit_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run log has the fit's end even if a listener's on_fit_end does not return in time."""
    went_in, may_go_on = threading.Event(), threading.Event()

    class Uploading(TrainingListener):
        def on_fit_end(self, event: FitEnd) -> None:
            went_in.set()
            assert may_go_on.wait(30)

    monkeypatch.setattr("sparkstrom.fit.listeners.LISTENERS_END_S", 0.0)
    path = tmp_path / "run.jsonl"
    request: Any = SimpleNamespace(listeners=[Uploading()], run_log=path, resume_from=None)
    model: Any = DenseNetwork([1, 2])
    heard = make_listener_thread(
        request, SPEC, model, SharedTrainingMaster(), lambda: cast(Any, None), ProgressDisplay()
    )

    def fail() -> None:
        raise ZeroDivisionError("an error")

    with pytest.raises(ZeroDivisionError):
        run(heard, fail)
    assert went_in.wait(30)
    begin, end = read_run_log(path)
    assert (begin["event"], end["event"]) == ("fit_begin", "fit_end")
    assert {"void", "publish_every"} <= begin["options"].keys()
    assert "given" not in begin["options"]  # a set of names, in random order
    may_go_on.set()
    heard._thread.join(30)


class Printer:
    """A listener that prints at each iteration, as users' listeners do."""

    def __init__(self) -> None:
        self.heard = 0

    def on_iteration(self, event: Iteration) -> None:
        self.heard += 1
        print(event.minibatches, flush=True)


def test_listener_printing_to_closed_stdout_causes_only_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A listener whose output is closed, as with ``| head -1``, still gets events; one warning."""

    class Unread(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError(32, "Broken pipe")

    printer = Printer()
    thread = make_thread(printer)

    def fit() -> Any:
        thread.on_fit_begin(SPEC)
        for minibatches in (1, 2):
            thread.on_progress(replace(START, minibatches=minibatches))
            while printer.heard < minibatches:
                thread._changed.acquire()
                thread._changed.release()
        thread.on_progress(replace(START, minibatches=2))
        return Summary()

    monkeypatch.setattr(sys, "stdout", Unread())
    summary = thread.run_fit(fit)
    [warning] = summary.warnings
    assert "sys.stdout cannot be written (BrokenPipeError" in warning


def test_exception_in_on_fit_end_becomes_warning() -> None:
    """An exception in on_fit_end becomes a warning in the summary."""

    class Late(TrainingListener):
        def on_fit_end(self, event: FitEnd) -> None:
            raise RuntimeError("upload failed")

    summary = run(make_thread(Late()), lambda: None)
    (warning,) = summary.warnings
    assert warning.startswith("listener Late.on_fit_end raised RuntimeError: upload failed")


def test_fit_end_event_has_error_of_failed_fit() -> None:
    """Listeners get the end of a failed fit with its error, which is raised unchanged."""
    diary = RecordingListener()

    def fit() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(make_thread(diary), fit)
    assert (diary.events[-1].summary, diary.events[-1].error) == (None, "KeyboardInterrupt")


@pytest.mark.parametrize("wrong", [object(), RecordingListener, print, 3])
def test_rejects_listener_without_event_methods(wrong: Any) -> None:
    """An object without any listener method is refused."""
    with pytest.raises(
        UsageError, match=r"has no method for events: .* on_fit_begin, on_iteration"
    ):
        check_listeners([wrong])


def test_rejects_listener_not_in_list() -> None:
    """A listener that is not in a list is refused."""
    with pytest.raises(UsageError, match="must be a list"):
        check_listeners(RecordingListener())  # type: ignore[arg-type]
    check_listeners([RecordingListener()])


def test_controller_replacement_sends_no_second_fit_begin() -> None:
    """With a new controller there is no second FitBegin; all workers leave and join again."""
    diary = RecordingListener()
    heard = make_thread(diary)

    def fit() -> Any:
        for _ in range(2):
            heard.on_fit_begin(SPEC)
            heard.on_progress(START)
        return Summary()

    heard.run_fit(fit)
    assert diary.kinds.count("FitBegin") == 1
    came, went, again = (each for each in diary.events if isinstance(each, WorkerChange))
    assert (came.joined, again.joined) == (frozenset({0, 1}), frozenset({0, 1}))
    assert (went.left, went.training) == (frozenset({0, 1}), frozenset())
    assert went.reasons == ("the controller was lost, and all workers with it",)
