"""Tests of the end of parallel inference: closing, forks, and exceptions that end a program."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from typing import Any

import pytest

from sparkstrom import InferenceMode, ParallelInference
from sparkstrom.base.errors import UsageError
from tests.unit.serving.conftest import (
    DEADLINE_S,
    MODES,
    WIDTH,
    BlockedServer,
    Probe,
    Watch,
    probe,
    rows,
    serving,
)


def test_close_answers_waiting_requests_and_refuses_later_ones(watch: Watch) -> None:
    """Closing answers all waiting requests and refuses later ones."""
    held = BlockedServer(watch, queue_limit=10)
    waiting = [held.inference.submit(rows(i)) for i in range(10)]
    closing = threading.Thread(target=held.inference.close)
    closing.start()
    held.go_on()
    closing.join(DEADLINE_S)
    assert [one.result(0)[0, 0] for one in waiting] == list(range(10))
    for ask in (held.inference.output, held.inference.submit):
        with pytest.raises(UsageError, match="is closed"):
            ask(rows(1))
    held.inference.shutdown()  # a second call


def test_close_timeout_refuses_waiting_requests(watch: Watch) -> None:
    """After the timeout, waiting requests are refused; the running one is still answered."""
    held = BlockedServer(watch)
    waiting = held.inference.submit(rows(1))
    assert not held.inference.close(timeout=0.001)
    with pytest.raises(UsageError, match="is closed"):
        waiting.result(0)
    held.go_on()
    assert held.first.result(DEADLINE_S)[0, 0] == 0
    assert held.inference.close(timeout=DEADLINE_S)


@pytest.mark.parametrize("timeout", [0, -1, "5", float("nan")])
def test_invalid_close_timeout_is_refused(timeout: Any) -> None:
    """An invalid timeout raises ``UsageError`` and closes nothing."""
    with serving() as inference:
        with pytest.raises(UsageError, match=f"timeout={timeout!r}"):
            inference.close(timeout=timeout)
        assert inference.output(rows(1))[0, 0] == 1


def test_closed_inplace_inference_refuses_requests(watch: Watch) -> None:
    """Inference in place is refused after closing, too."""
    inference = serving(inference_mode="inplace")
    inference.close()
    with pytest.raises(UsageError, match="is closed"):
        inference.output(rows(1))


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_system_exit_in_predict_does_not_end_worker(error: type[BaseException]) -> None:
    """``SystemExit`` in ``predict`` is raised to the caller; the worker thread continues."""

    class Leaving(Probe):
        def predict(self, features: Any) -> Any:
            if (features < 0).any():
                raise error(3)
            return features

    with ParallelInference(Leaving([WIDTH, WIDTH]), workers=1) as inference:
        with pytest.raises(error):
            inference.submit(rows(-1)).result(5)
        assert inference.submit(rows(1)).result(DEADLINE_S)[0, 0] == 1


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("value", [1, -1])
def test_system_exit_in_callback_does_not_end_worker(
    watch: Watch, error: type[BaseException], value: float, caplog: pytest.LogCaptureFixture
) -> None:
    """``SystemExit`` in a callback is logged; the worker thread continues."""

    def leave(_: Any) -> None:
        raise error(3)

    held = BlockedServer(watch)
    held.inference.submit(rows(value)).add_done_callback(leave)
    beside = held.inference.submit(rows(2))  # answered in the same call
    held.go_on()
    assert beside.result(5)[0, 0] == 2
    assert held.inference.submit(rows(3)).result(5)[0, 0] == 3
    held.inference.close()
    assert error.__name__ in caplog.text


@pytest.mark.parametrize("mode", MODES)
def test_request_in_forked_process_is_refused(watch: Watch, mode: InferenceMode) -> None:
    """In a forked process, requests raise ``UsageError`` and do not wait for a borrowed copy."""
    with (
        serving(1.0, inference_mode=mode, workers=1) as inference,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads
        ours, theirs = os.pipe()
        with inference._pool.borrow():
            if not (child := os.fork()):
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(10)  # ends the child if it blocks
                for ask in (inference.output, inference.submit, inference.update_model):
                    try:
                        answer = ask(rows(1))
                    except BaseException as error:
                        answer = error
                    os.write(theirs, f"{answer!r}\n".encode())
                inference.close()
                os._exit(0)
        os.close(theirs)
        with open(ours, encoding="utf-8") as heard:
            said = heard.read().splitlines()
        os.waitpid(child, 0)
        assert len(said) == 3
        assert all("UsageError" in line and "forked from it" in line for line in said), said
        assert inference.output(rows(1))[0, 0] == 2


def test_update_model_after_close_is_refused(watch: Watch) -> None:
    """Replacing the model after closing raises ``UsageError``."""
    inference = serving(1.0)
    inference.close()
    with pytest.raises(UsageError, match="is closed"):
        inference.update_model(*probe(2.0)[:1])
