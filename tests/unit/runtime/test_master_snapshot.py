"""The master's thread: snapshots of its parameters while it runs, fails or has ended.

Also: what its progress and failure are at the end of a fit.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import numpy as np
import pytest

from benchmarks.memory_transport import MemoryNetwork, MemoryTransport
from sparkstrom.base.clock import SystemClock
from sparkstrom.base.errors import TrainingError
from sparkstrom.codec.messages import Commit, Phase
from sparkstrom.codec.sealed_frames import KEY_BYTES, Seal
from sparkstrom.observe.telemetry import TrainingCounters, WorkerCounters
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.protocol.master.members import MasterLimits
from sparkstrom.runtime import master_thread
from sparkstrom.runtime.master_control import Snapshot
from sparkstrom.runtime.master_thread import MasterPlan, MasterThread
from sparkstrom.runtime.theta import Theta
from sparkstrom.transport.base import ReceivedFrame

K, N = 20, 300


class FailingTransport(MemoryTransport):
    """A transport whose ``poll`` raises once ``broken`` is set."""

    broken = False

    def poll(self, wait_s: float) -> list[ReceivedFrame]:
        if self.broken:
            raise OSError("broken on purpose")
        return super().poll(wait_s)


@pytest.fixture
def make_master() -> Iterator[Callable[[Theta], tuple[MasterThread, FailingTransport]]]:
    """A factory of started masters with a ``Breaking`` transport; they are ended after the test."""
    network, masters = MemoryNetwork(), list[MasterThread]()
    transport = FailingTransport(network, network.open().endpoint)

    def make(theta: Theta) -> tuple[MasterThread, FailingTransport]:
        masters.append(
            MasterThread(
                MasterPlan(FitSpec(2, 1, 3, "1"), 1 << 20, 1024, {}),
                MasterLimits(),
                theta,
                open_transport=lambda before: transport,
                seal=Seal(secrets.token_bytes(KEY_BYTES), 1),
                clock=SystemClock(),
            )
        )
        masters[-1].start()
        return masters[-1], transport

    yield make
    for master in masters:
        master.end()


def test_snapshot_has_commit_and_is_independent_of_theta(
    make_master: Callable[[Theta], tuple[MasterThread, FailingTransport]],
) -> None:
    """A snapshot has its commit and does not change when theta does."""
    theta = Theta(N, K)
    theta.load(np.full(N, 0.5, np.float32))
    theta.commit, theta.buffers = 7, b"statistics"
    master, _ = make_master(theta)
    made = master.snapshot()
    theta.load(np.full(N, 1.0, np.float32))
    theta.buffers = b"newer ones"
    assert (made.commit, made.buffers) == (7, b"statistics")
    np.testing.assert_array_equal(made.parameters, np.full(N, 0.5, np.float32))


def test_snapshot_has_all_commits_up_to_its_number(
    make_master: Callable[[Theta], tuple[MasterThread, FailingTransport]],
    make_commit: Callable[..., Commit],
) -> None:
    """A snapshot has all commits up to its number and no later one."""
    master, _ = make_master(Theta(N, K))
    master.end()
    for commit in (1, 2):
        master._perform(ev.ApplyCommit(make_commit(commit, 5)))
        made = master._make_snapshot()
        assert made.commit == commit
        assert np.count_nonzero(made.parameters) == 1


def test_abort_after_end_of_fit_is_no_failure(
    make_master: Callable[[Theta], tuple[MasterThread, FailingTransport]],
) -> None:
    """The progress shows that a fit is done, and an abort after that is not a failure."""
    master, _ = make_master(Theta(N, K))
    master.end()
    master._machine.phases.phase = Phase.DONE
    master._perform(ev.Complete())
    assert master.progress.phase is Phase.DONE
    master._perform(ev.Abort("a task was ended together with the application"))
    assert master.failure is None


def test_counters_of_returned_process_replace_former_counters(
    make_master: Callable[[Theta], tuple[MasterThread, FailingTransport]],
) -> None:
    """Counters that name a former id replace the counters of that id."""
    master, _ = make_master(Theta(N, K))
    master.end()
    told = [WorkerCounters(TrainingCounters(partition, steps=partition)) for partition in range(3)]
    master._perform(ev.ReportCounters(1, told[0]))
    master._perform(ev.ReportCounters(2, told[1]))
    master._perform(ev.ReportCounters(3, told[2], frozenset({1})))
    assert master._read_progress().stats == {2: told[1], 3: told[2]}


def test_snapshot_raises_error_of_failed_thread(
    make_master: Callable[[Theta], tuple[MasterThread, FailingTransport]],
) -> None:
    """After the thread has failed, ``snapshot`` raises the thread's error."""
    master, transport = make_master(Theta(N, K))
    transport.broken = True
    master.finished.wait(30)
    with pytest.raises(TrainingError, match="broken on purpose"):
        master.snapshot()


def test_snapshot_succeeds_if_thread_fails_after_fit_is_done(
    make_master: Callable[[Theta], tuple[MasterThread, FailingTransport]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A snapshot, as for a last checkpoint, succeeds if the thread fails after a fit is done."""
    monkeypatch.setattr(master_thread, "SNAPSHOT_TIMEOUT_S", 1)
    theta = Theta(N, K)
    theta.load(np.full(N, 0.5, np.float32))
    theta.commit = 7
    master, transport = make_master(theta)
    master._machine.phases.phase = Phase.DONE
    master.finished.set()
    transport.broken = True
    master.join(30)
    assert master.failure is None
    made = master.snapshot(updaters=True)
    assert made.commit == 7
    np.testing.assert_array_equal(made.parameters, np.full(N, 0.5, np.float32))


def test_end_closes_transport_of_master_that_never_started(
    make_master: Callable[[Theta], tuple[MasterThread, FailingTransport]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``end`` closes the transport also if the thread was never started or could not be.

    The constructor opens it, and its media driver would live as long as the program.
    """
    monkeypatch.setattr(MasterThread, "start", lambda self: None)
    master, transport = make_master(Theta(N, K))
    master.end()
    assert transport._is_closed
    master.end()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_end_and_snapshot_succeed_if_transport_close_raises(
    make_master: Callable[[Theta], tuple[MasterThread, FailingTransport]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If closing the transport raises, ``end`` returns and a snapshot succeeds."""
    monkeypatch.setattr(master_thread, "SNAPSHOT_TIMEOUT_S", 1)
    master, transport = make_master(Theta(N, K))

    def close() -> None:
        raise OSError("cannot be closed")

    monkeypatch.setattr(transport, "close", close)
    master.end()
    assert master.snapshot().commit == 0


def test_queued_snapshot_request_gets_error_of_failed_thread(
    make_master: Callable[[Theta], tuple[MasterThread, FailingTransport]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A snapshot request that is queued when the thread fails gets the thread's error."""
    master, transport = make_master(Theta(N, K))
    asked = Future[Snapshot]()

    def poll(wait_s: float) -> list[ReceivedFrame]:
        master._snapshot_requests.put(asked)
        raise OSError("broken on purpose")

    monkeypatch.setattr(transport, "poll", poll)
    with pytest.raises(TrainingError, match="broken on purpose"):
        asked.result(30)


def test_snapshot_succeeds_after_cancelled_fit_ended(
    make_master: Callable[[Theta], tuple[MasterThread, FailingTransport]],
) -> None:
    """After Ctrl-C or a cancelled job, a snapshot succeeds, so that parameters can be saved."""
    theta = Theta(N, K)
    theta.load(np.full(N, 0.5, np.float32))
    theta.commit = 7
    master, _ = make_master(theta)
    master.give_up("KeyboardInterrupt")
    assert master.finished.wait(30)
    master.end()
    assert master.failure is not None
    made = master.snapshot(updaters=True)
    assert made.commit == 7
    np.testing.assert_array_equal(made.parameters, np.full(N, 0.5, np.float32))
