"""Tests of worker processes that die or fail: each row still counts once, or the fit says why."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from sparkstrom import ParallelWrapper, TrainingError
from sparkstrom.local.data import RowFile
from sparkstrom.local.worker_pool import (
    ActiveWorkers,
    GradientSharingTask,
    WorkerAnswer,
    WorkerPool,
)
from sparkstrom.worker.task_environment import TaskEnvironment

EPOCHS = 4


LOOKS_MAX = 900  # calls of ``answers``, which wait up to 0.1 s
LEASE_S = 4.0  # longer than any process waits for a processor on a busy machine


class Killer:
    """A listener that sends one signal to a worker process at each of some minibatch counts."""

    def __init__(self, wrapper: ParallelWrapper, at: list[int], *signals: int) -> None:
        self._wrapper, self._at, self._signals = wrapper, at, list(signals)
        self.killed: list[int] = []

    def on_iteration(self, event: Any) -> None:
        if self._at and event.minibatches >= self._at[0]:
            self._at.pop(0)
            self.killed.append(self._wrapper.worker_pids()[-1])
            os.kill(self.killed[-1], self._signals.pop(0))


@pytest.mark.slow
def test_killed_and_stopped_workers_are_replaced_without_lost_rows(
    wrapper: Any, tally_case: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A killed and a stopped worker are replaced, and each row is trained once per epoch."""
    made = wrapper(tally_case.model(), 3, lease_s=LEASE_S, **tally_case.options)
    summary = made.fit(tally_case.data, epochs=EPOCHS)
    assert summary.replicas_equal
    assert tally_case.trainings(made) == {EPOCHS: tally_case.rows}
    before = made.worker_pids()

    killer = Killer(made, [60, 300], signal.SIGKILL, signal.SIGSTOP)
    summary = made.fit(tally_case.data, epochs=EPOCHS, listeners=[killer])
    print(summary.departures, summary.seconds)
    assert len(killer.killed) == 2
    assert summary.replicas_equal
    assert len(set(summary.hashes.values())) == 1
    assert summary.minibatches == summary.minibatches_expected
    assert tally_case.trainings(made) == {2 * EPOCHS: tally_case.rows}
    assert len(summary.faults) == 2
    assert len(made.worker_pids()) == 3
    assert set(before[:2]) < set(made.worker_pids())
    assert not set(killer.killed) & set(made.worker_pids())
    assert "is replaced, its process was killed by SIGKILL" in caplog.text
    assert "is replaced, its process gave no sign of life for 4 s" in caplog.text
    warned = " ".join(summary.warnings)
    assert "the process of partition 2 was killed by SIGKILL: another one has replaced it" in warned
    assert "the process of partition 2 gave no sign of life for 4 s: another one" in warned


def make_failing_model(tally: Any, how: str) -> Any:
    """Return a model whose third step fails, by an exception or by the end of the process."""

    class Failing(tally):
        def __init__(self) -> None:
            super().__init__()
            self.how, self.steps = how, 0

        def step(self, batch: Any) -> float:
            self.steps += 1
            if self.steps == 3 and self.how == "raise":
                raise ZeroDivisionError("no such step")
            if self.steps == 3 and self.how == "exit":
                print("last words", flush=True)
                os._exit(7)
            return super().step(batch)

    return Failing()


@pytest.mark.slow
def test_worker_exception_ends_fit_with_one_line_error(wrapper: Any, tally_case: Any) -> None:
    """An exception in a worker ends the fit with an error of one line; a later fit succeeds."""
    model = make_failing_model(tally_case.model, "raise")
    made = wrapper(model, 2, **tally_case.options)
    with pytest.raises(TrainingError, match="ZeroDivisionError: no such step") as raised:
        made.fit(tally_case.data, epochs=3)
    assert len(str(raised.value).splitlines()) == 1
    assert raised.value.partition in (0, 1)
    assert "in step" in "".join(raised.value.__notes__)
    assert tally_case.trainings(made) == {0: tally_case.rows}
    model.how = "no more"
    made.fit(tally_case.data)
    assert tally_case.trainings(made) == {1: tally_case.rows}


@pytest.mark.slow
def test_fit_ends_after_worker_process_died_four_times(wrapper: Any, tally_case: Any) -> None:
    """A fit ends once a worker's process has died four times; the error has its exit status."""
    made = wrapper(make_failing_model(tally_case.model, "exit"), 1, **tally_case.options)
    why = r"the process of worker 0 has died 4 times; the last one ended with exit status 7"
    with pytest.raises(TrainingError, match=why) as raised:
        made.fit(tally_case.data)
    assert "last words" in "".join(raised.value.__notes__)


@pytest.mark.slow
def test_stopped_idle_worker_is_replaced_at_next_order(tmp_path: Path) -> None:
    """A stopped process is replaced, although its unread order is larger than a socket's buffer."""
    pool = WorkerPool(1, tmp_path, LEASE_S)
    order = GradientSharingTask(
        bytes(1 << 22), TaskEnvironment(0, 0, "", "", tmp_path), RowFile("", ())
    )

    def answer(workers: ActiveWorkers) -> WorkerAnswer | None:
        """Send the order; return the worker's answer, or None if the worker must be replaced."""
        workers.begin()
        workers.send(0, order)
        for _ in range(LOOKS_MAX):
            for _, found in workers.answers([0]):
                return found
        raise AssertionError("it neither answers nor counts as gone")

    found = answer(ActiveWorkers(pool))
    assert found is not None
    assert "UnpicklingError" in found.kind  # zeros are not a job
    (before,) = pool.pids()
    os.kill(before, signal.SIGSTOP)
    again = ActiveWorkers(pool)
    assert answer(again) is None
    assert again.replace(0) == "gave no sign of life for 4 s"
    assert before not in pool.pids()
    found = answer(again)
    assert found is not None
    pool.close()
