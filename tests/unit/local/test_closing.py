"""Tests of closing a ``ParallelWrapper`` from another thread while its fit reads rows or starts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from sparkstrom import ParallelWrapper, TrainingError
from sparkstrom.encoding.backends import warm_up
from sparkstrom.local import parallel_wrapper
from sparkstrom.models import DenseNetwork

LIMIT_S = 10.0
ROW = (np.ones(2, np.float32), 1)
CLOSED = "this ParallelWrapper was closed while it trained"


@pytest.fixture(scope="module", autouse=True)
def compiled_kernels() -> None:
    """Compile the kernels before the tests, whose fits have seconds."""
    warm_up()


@pytest.fixture(params=["SHARED_GRADIENTS", "AVERAGING"])
def closable_wrapper(request: pytest.FixtureRequest) -> Iterator[ParallelWrapper]:
    wrapper = ParallelWrapper(DenseNetwork([2, 2]), 1, training_mode=request.param, progress=False)
    yield wrapper
    wrapper.close()
    assert not wrapper._context.scratch.exists()


def test_close_fails_fit_that_waits_for_rows(closable_wrapper: ParallelWrapper) -> None:
    """A fit that waits for rows fails at once when the wrapper is closed."""
    waits, let_go, errors = threading.Event(), threading.Event(), list[TrainingError]()

    def rows() -> Iterator[Any]:
        yield ROW
        waits.set()
        let_go.wait(2 * LIMIT_S)

    def fit() -> None:
        with pytest.raises(TrainingError, match=CLOSED) as error:
            closable_wrapper.fit(rows(), run_log="")
        errors.append(error.value)

    training = threading.Thread(target=fit)
    training.start()
    assert waits.wait(LIMIT_S)
    closable_wrapper.close()
    training.join(LIMIT_S)
    is_over = not training.is_alive()
    let_go.set()
    training.join(LIMIT_S)
    assert is_over
    assert len(errors) == 1


@pytest.mark.parametrize("last", ["partition_rows", "FitSession", "LocalFitRunner"])
def test_error_of_closed_fit_mentions_closing_at_every_step(
    closable_wrapper: ParallelWrapper, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    """The error mentions the closing, at whatever step of the fit (``last``) it happened."""
    if last == "LocalFitRunner" and closable_wrapper._rounds is not None:
        last = "RoundsRun"
    make = getattr(parallel_wrapper, last)

    def then_closed(*given: Any, **named: Any) -> Any:
        if not last.startswith("partition"):
            closable_wrapper.close()
        result = make(*given, **named)
        closable_wrapper.close()
        return result

    monkeypatch.setattr(parallel_wrapper, last, then_closed)
    with pytest.raises(TrainingError, match=CLOSED):
        closable_wrapper.fit([ROW] * 4, run_log="")
