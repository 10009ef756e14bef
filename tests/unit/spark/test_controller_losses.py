"""Tests of lost controllers: a fit resumes from a copy, starts again or ends; and of the copies."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sparkstrom import SharedTrainingMaster, VoidConfiguration
from sparkstrom.base.errors import ControllerLost, TrainingError
from sparkstrom.checkpoint.directory import CheckpointDirectory
from sparkstrom.checkpoint.writer import parse_checkpoint_every
from sparkstrom.codec.messages import Phase
from sparkstrom.fit import session as controller_copies
from sparkstrom.fit.checkpoints import CheckpointConfig, FitCheckpoints, FitKey
from sparkstrom.fit.early_stopping_listener import EarlyStoppingListener
from sparkstrom.fit.fit_context import FitReporting, FitRequest, TaskSlots
from sparkstrom.fit.session import ControllerCopyListener, ControllerRecovery, FitSession
from sparkstrom.fit.strategy import GradientSharing
from sparkstrom.fit.summary import FitRecord
from sparkstrom.observe.early_stopping import EarlyStopping, MaxTimeIterationTerminationCondition
from sparkstrom.observe.epoch_history import EpochHistory
from sparkstrom.observe.progress import ProgressDisplay
from sparkstrom.runtime.master_control import MasterControl, Progress
from sparkstrom.runtime.optimizer_states import OptimizerStates
from sparkstrom.spark.controller.driver_messages import EndController, GetSnapshot
from sparkstrom.spark.controller.remote_controller import RemoteController
from tests.unit.spark.test_checkpoint_listener import MODEL, SPEC, Master

NO_DATA: Any = None
DEADLINE_S = 60.0
CALL = FitRequest(9, NO_DATA, None, (), None, FitKey(1))
LOST = ControllerLost("the controller is gone. Run it again", "executor 1 on h: killed")


class ConnectedMaster(Master):
    """A fake master with a connection; the test sets ``is_reachable``."""

    def __init__(self) -> None:
        super().__init__()
        self.is_reachable = True
        self.progress = Progress(Phase.RUNNING, 2, 2, 2, 50, 900, 40, 0.0, {})


class Bench:
    """A fit's controller copies in a real folder, and its recovery from lost controllers."""

    def __init__(self, folder: Path, restarts: int = 1, controller: str = "executor") -> None:
        self.master, self.said = ConnectedMaster(), list[str]()
        void = VoidConfiguration(controller=controller, controller_restarts=restarts)
        options = SharedTrainingMaster(void)
        progress = cast(ProgressDisplay, type("", (), {"say": self.said.append})())
        showing = FitReporting(progress, FitRecord(), TaskSlots(2, 2), [])
        checkpoints = FitCheckpoints(MODEL, options, "n")
        self.losses = ControllerRecovery(
            GradientSharing(options), checkpoints, showing, str(folder)
        )
        directory, due = CheckpointDirectory(str(folder), 1), parse_checkpoint_every("2 updates")
        kept = CheckpointConfig(
            directory, due, FitKey(1), MODEL, "'auto'", 20, OptimizerStates(), {}
        )
        master = cast(MasterControl, self.master)
        watch, told = EarlyStoppingListener(master, None), list[Any]()
        about: dict[str, Any] = {"stopping": watch, "notify": told.append, "say": self.said.append}
        self.copies = ControllerCopyListener(kept, master, book=EpochHistory(), **about)
        self.copies.on_fit_begin(SPEC)
        self.copies.on_phase(Phase.RUNNING)

    def look(self, commits: int) -> None:
        """Report progress after this number of commits; wait until a due copy is written."""
        self.master.commit = commits
        self.copies.on_progress(Progress(Phase.RUNNING, 2, 2, 2, commits, 900, commits, 0.0, {}))
        if self.master.states and not self.master.states[-1].done():
            self.master.states[-1].set_result(())
        assert self.copies._writer._wait_until_idle(time.monotonic() + 60)

    def next_request(self) -> FitRequest:
        """Return the request with which the fit continues after a loss."""
        master = cast(MasterControl, self.master)
        return self.losses.next_request(LOST, CALL, master, self.copies)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(controller_copies, "COPY_TIME_FACTOR", 0.0)  # each copy is due at once
    return Bench(tmp_path)


def test_fit_resumes_from_newest_controller_copy(bench: Bench) -> None:
    """A fit resumes from the newest copy; a warning counts the minibatches trained again."""
    bench.look(3)
    bench.look(7)
    point = bench.next_request().resume_from
    assert point is not None
    assert point.commit == 7
    assert [start.position.batch for start in point.starts] == [7, 7]
    (told,) = bench.losses._reporting.warnings
    assert "executor 1 on h: killed" in told
    assert "from a copy of 7 commits: 36 minibatches are trained again, 14 are not" in told
    assert "(loss 1 of controller_restarts=1)" in told


def test_fit_without_copy_restarts_until_limit(bench: Bench) -> None:
    """Without a copy, the fit starts again; more losses than controller_restarts end it."""
    assert bench.next_request() is CALL
    assert "starts again" in bench.losses._reporting.warnings[-1]
    assert "50 minibatches are trained again" in bench.losses._reporting.warnings[-1]
    with pytest.raises(ControllerLost, match=r"Run it again It was loss 2 of this fit") as caught:
        bench.next_request()
    assert caught.value.__cause__ is LOST


def test_copies_need_restarts_and_controller_on_executor(tmp_path: Path) -> None:
    """Copies are made only with restarts and a controller on an executor."""
    none = Bench(tmp_path, restarts=0).losses
    assert not none.keeps_copies
    assert not Bench(tmp_path, controller="driver").losses.keeps_copies
    assert Bench(tmp_path).losses.keeps_copies
    with pytest.raises(ControllerLost, match=r"^the controller is gone. Run it again$"):
        none.next_request(LOST, CALL, cast(MasterControl, ConnectedMaster()), None)


def test_controller_copies_take_bounded_share_of_time(bench: Bench, monkeypatch: Any) -> None:
    """After a copy, the next one is due only after a multiple of the time that it took."""
    monkeypatch.setattr(controller_copies, "COPY_TIME_FACTOR", 1e9)
    bench.look(3)
    for commits in (7, 9):
        bench.look(commits)
    assert len(bench.master.states) == 1


def test_unreachable_controller_or_failed_copy_does_not_end_fit(
    bench: Bench,
) -> None:
    """Without a connection, no copy is requested; a failed copy raises only if the fit failed."""
    bench.master.is_reachable = False
    bench.look(3)
    assert not bench.master.states
    bench.master.is_reachable, bench.master.raises = True, TrainingError("it sent none")
    bench.look(3)
    assert not bench.master.states
    bench.master.failure = LOST
    with pytest.raises(TrainingError, match="it sent none"):
        bench.look(9)


def test_copy_messages_do_not_mention_checkpoints(bench: Bench) -> None:
    """Messages about copies do not mention checkpoints, which the user may not have requested."""
    bench.master.raises = TrainingError("it sent none")
    bench.look(3)
    bench.master.raises = None
    bench.look(7)
    failed, works = bench.said
    assert failed == (
        "no copy of the controller's replica at commit 3 could be made (TrainingError: it sent"
        " none); the next one is tried when due"
    )
    assert works == "copies of the controller's replica are made again, after 1 that failed"


@pytest.mark.parametrize(
    ("cause", "is_loss"),
    [
        ("ExecutorLostFailure (executor 1 exited): exit code 137", True),
        ("org.apache.spark.SparkException: Python worker exited unexpectedly", True),
        ("nothing heard from it for 30 s", True),
        ("ImportError: cannot import name 'x'", False),
        ("sparkstrom.base.errors.TransportError: opening: Aeron error", False),
    ],
)
def test_python_error_of_task_is_not_controller_loss(cause: str, *, is_loss: bool) -> None:
    """A Python exception of the task is an ordinary error, not a loss of the controller."""
    master = RemoteController(NO_DATA, NO_DATA, {}, 2)
    assert isinstance(master._create_lost_error(cause), ControllerLost) is is_loss


@pytest.mark.parametrize("is_closed", [False, True])
def test_ending_controller_twice_sends_no_second_request(is_closed: bool) -> None:
    """Ending the controller twice sends no second request, as when a fit fails at its end."""
    master, asked = RemoteController(NO_DATA, NO_DATA, {}, 2), list[object]()

    def ask(request: object) -> Future[Any]:
        asked.append(request)
        answer: Future[Any] = Future()
        answer.set_exception(LOST)
        return answer

    server = SimpleNamespace(is_open=True, ask=ask, close=lambda: None)
    master._server = cast(Any, server)
    job = SimpleNamespace(running=False)
    master._placed = cast(Any, SimpleNamespace(job=job, place="executor 1"))
    master._monitor_thread = threading.Thread()
    master._monitor_thread.start()
    if is_closed:
        master._close()
    else:
        master.end()
        assert EndController() in asked
    asked.clear()
    master.end()
    assert asked == []


def test_interrupted_end_is_repeated_by_next_call() -> None:
    """If ``end`` is interrupted while it fetches parameters, the next call ends the task."""
    master, asked = RemoteController(NO_DATA, NO_DATA, {}, 2), list[object]()
    answers: list[BaseException] = [KeyboardInterrupt(), LOST]

    def ask(request: object) -> Future[Any]:
        asked.append(request)
        answer: Future[Any] = Future()
        if isinstance(request, GetSnapshot) and isinstance(answers[0], KeyboardInterrupt):
            raise answers.pop(0)
        answer.set_exception(LOST)
        return answer

    server = SimpleNamespace(is_open=True, ask=ask, close=lambda: None)
    master._server = cast(Any, server)
    job = SimpleNamespace(running=False)
    master._placed = cast(Any, SimpleNamespace(job=job, place="executor 1"))
    master._monitor_thread = threading.Thread()
    master._monitor_thread.start()
    with pytest.raises(KeyboardInterrupt):
        master.end()
    assert EndController() not in asked
    master.end()
    assert EndController() in asked


def test_failed_optimizer_state_request_yields_no_states() -> None:
    """A request for optimizer states that ends with an error has the result ()."""
    master, answer = RemoteController(NO_DATA, NO_DATA, {}, 2), Future[Any]()
    master._server = cast(Any, SimpleNamespace(ask=lambda request: answer))
    states = master.copy_optimizer_states(everybody=True)
    answer.set_exception(LOST)
    assert states.result(0) == ()


@pytest.mark.parametrize("is_heard_again", [False, True])
def test_silent_controller_is_lost_only_after_second_poll(*, is_heard_again: bool) -> None:
    """A silent controller is lost only after a second poll, before which messages are read."""
    master = RemoteController(NO_DATA, NO_DATA, {}, 2)
    server = SimpleNamespace(was_connected=threading.Event(), heard_s=time.monotonic() - 60.0)
    server.was_connected.set()
    master._server = cast(Any, server)
    looks: list[float] = []

    def wait(seconds: float) -> bool:
        looks.append(seconds)
        if len(looks) == 2 and is_heard_again:
            server.heard_s = time.monotonic()
        if len(looks) == 4:
            master._ending.set()
        return False

    job = SimpleNamespace(wait=wait, count_tasks=lambda: ([], []), task_errors=list)
    master._monitor_task(cast(Any, job), None)
    assert isinstance(master.failure, ControllerLost) is not is_heard_again
    assert len(looks) == (4 if is_heard_again else 2)


class Run:
    """A fake run that is its own master: it can be unreachable, be lost, or fail to copy."""

    def __init__(self, commit: int, *, reachable: bool = True) -> None:
        self.master = cast(Any, self)
        self._reachable, self.finished = reachable, threading.Event()
        self._commit, self.asked, self.looked_at = commit, threading.Event(), threading.Event()
        self.failure: TrainingError | None = None
        self.raises: list[TrainingError] = []

    @property
    def is_reachable(self) -> bool:
        found = self._reachable
        self.looked_at.set()
        return found

    def connect(self) -> None:
        self._reachable = True

    def lose(self) -> None:
        self.finished.set()

    def snapshot(self) -> int:
        self.asked.set()
        if self.finished.is_set():
            raise LOST
        assert self._reachable, "nobody answers yet"
        if self.raises:
            raise self.raises.pop()
        return self._commit


def session(run: Run) -> FitSession:
    """Return a session whose current run is this one."""
    fit = FitSession(*cast(Any, [None] * 5))
    fit._runner = cast(Any, run)
    return fit


def request_snapshot_after_loss(first: Run) -> tuple[FitSession, Future[Any]]:
    """Return a session whose controller is lost, and a snapshot requested after the loss."""
    fit = session(first)
    first.lose()
    answer = ThreadPoolExecutor(1).submit(fit._snapshot)
    assert first.asked.wait(DEADLINE_S)
    return fit, answer


def test_listener_snapshot_waits_for_next_controller() -> None:
    """A listener's snapshot waits until the next controller is connected, and comes from it."""
    fit, answer = request_snapshot_after_loss(Run(1))
    later = Run(2, reachable=False)
    fit._switch_to(cast(Any, later))
    assert later.looked_at.wait(DEADLINE_S)
    later.connect()
    assert answer.result(DEADLINE_S) == 2


def test_failed_listener_snapshot_is_requested_again() -> None:
    """A failed snapshot is requested again, as while the media driver is replaced."""
    run = Run(3)
    run.raises = [TrainingError("it sent none"), TrainingError("it sent none")]
    assert session(run)._snapshot() == 3


@pytest.mark.parametrize("over", [False, True])
def test_listener_snapshot_raises_at_once_after_fit_ends(over: bool) -> None:
    """In a failed or ended fit, the error of a listener's snapshot is raised at once."""
    run = Run(3)
    run.raises = [TrainingError("it sent none")]
    fit = session(run)
    if over:
        fit._end()
    else:
        run.failure = run.raises[0]
    with pytest.raises(TrainingError, match="it sent none"):
        fit._snapshot()


@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
def test_error_before_start_ends_controller(
    kind: type[BaseException], bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error before the start, such as a full disk or Ctrl-C, still ends the controller."""
    ended, run = list[Any](), Run(1)
    run.spec = SPEC  # type: ignore[attr-defined]
    run.end = lambda: ended.append(run)  # type: ignore[attr-defined]

    def fails(*_: Any) -> Any:
        raise kind

    monkeypatch.setattr(controller_copies, "make_listener_thread", fails)
    losses = bench.losses
    fit = FitSession(losses.strategy, losses.checkpoints, CALL, losses._reporting, NO_DATA)
    with pytest.raises(kind):
        fit.run(cast(Any, run), None)
    assert ended == [run]


def test_the_time_limit_of_early_stopping_includes_the_lost_controllers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before, ``MaxTimeIterationTerminationCondition`` counted anew with each controller."""
    rule = EarlyStopping(patience=None, conditions=[MaxTimeIterationTerminationCondition(60)])
    state = SimpleNamespace(
        rollback_on_error=contextlib.nullcontext,
        shared_buffers_warning=lambda: None,
        forget_resume_state=lambda: None,
    )
    checkpoints = SimpleNamespace(mark_failed_on_error=contextlib.nullcontext)
    call = replace(CALL, early_stopping=rule)
    fit = FitSession(*cast(Any, [None, checkpoints, call, None, state]))
    first, second, stops = Run(1), Run(2), list[str]()
    second.request_stop = stops.append  # type: ignore[attr-defined]
    now = [100.0]
    monkeypatch.setattr(controller_copies, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def run_one(runner: Run, stopping: EarlyStoppingListener, *_: Any) -> str:
        now[0] += 50.0
        if runner is first:
            raise LOST
        stopping._clock = lambda: now[0]
        stopping.on_phase(Phase.RUNNING)
        stopping.on_progress(Progress(Phase.RUNNING, 2, 2, 2, 0, 9, 0, 0.0, {}))
        return "the summary"

    fit._runner = cast(Any, first)
    fit._run_one = run_one  # type: ignore[method-assign, assignment]
    fit._resume = fit._checkpoint_listener = lambda *_: None  # type: ignore[method-assign]
    fit._restart = lambda *_: cast(Any, second)  # type: ignore[method-assign]
    recovery = SimpleNamespace(next_request=lambda *_: call)
    assert fit._run_all(*cast(Any, [None, recovery, None])) == "the summary"
    (reason,) = stops
    assert reason.endswith("is met after 100 s")


def test_listener_snapshot_raises_if_no_controller_follows() -> None:
    """A listener's snapshot raises ControllerLost if the fit ends without another controller."""
    fit, answer = request_snapshot_after_loss(Run(1))
    lost_again = Run(2)
    lost_again.lose()
    fit._switch_to(cast(Any, lost_again))
    fit._end()
    with pytest.raises(ControllerLost):
        answer.result(DEADLINE_S)


@pytest.mark.parametrize(
    ("restarts", "controller", "folders"),
    [(1, "executor", 1), (0, "executor", 0), (1, "driver", 0)],
)
def test_only_a_fit_that_is_copied_has_a_folder_for_copies(
    tmp_path: Path, monkeypatch: Any, restarts: int, controller: str, folders: int
) -> None:
    """Before, every fit had one, which a killed program left empty in the temporary directory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    losses = Bench(tmp_path / "bench", restarts, controller).losses
    with losses.create_folder():
        assert len([*tmp_path.glob("sparkstrom-copies-*")]) == folders
    assert not [*tmp_path.glob("sparkstrom-copies-*")]
