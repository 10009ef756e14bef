"""Tests that Ctrl-C during a fit cancels Spark's jobs and logs no traceback of Py4J."""

from __future__ import annotations

import inspect
import logging

import pytest

from sparkstrom.spark.jobs import PY4J_INTERRUPTED, cancel_jobs_on_interrupt


class Context:
    """A fake SparkContext that counts calls of cancelAllJobs."""

    cancelled = 0

    def cancelAllJobs(self) -> None:
        self.cancelled += 1


def test_interrupt_cancels_jobs_and_hides_py4j_message(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Py4J's message about an interrupted call is not logged in the block, but after it."""
    context = Context()

    def interrupted() -> None:
        with cancel_jobs_on_interrupt(context):
            logging.error("something else")
            logging.error(PY4J_INTERRUPTED)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert context.cancelled == 1
    assert caplog.messages == ["something else"]
    logging.error(PY4J_INTERRUPTED)
    assert caplog.messages[1:] == [PY4J_INTERRUPTED]


def test_installed_py4j_logs_filtered_message() -> None:
    """The installed Py4J logs the message that the filter looks for."""
    py4j = pytest.importorskip("py4j.java_gateway")
    assert f'logging.exception("{PY4J_INTERRUPTED}")' in inspect.getsource(py4j)
