"""Tests of find_cause, which extracts one informative line from Spark's long error messages."""

from __future__ import annotations

from unittest import mock

import pytest

from sparkstrom.base.errors import TrainingError
from sparkstrom.fit.supervisor import find_cause
from sparkstrom.spark.jobs import translate_job_errors

Py4JJavaError = pytest.importorskip("py4j.protocol", reason="it comes with pyspark").Py4JJavaError

PYTHON = """An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collectAndServe.
: org.apache.spark.SparkException: Job aborted: PythonException: Traceback (most recent call last):
  File "worker.py", line 2024, in main
    func = read_command(pickleSer, infile)
ModuleNotFoundError: No module named 'mine'

\tat org.apache.spark.api.python.BasePythonRunner.handlePythonException(PythonRunner.scala:581)
\tat java.base/java.lang.Thread.run(Thread.java:840)
"""


def test_cause_of_python_error_is_its_exception_line() -> None:
    assert find_cause(PYTHON) == "ModuleNotFoundError: No module named 'mine'"


def test_long_exception_is_cut_to_start_of_first_line() -> None:
    """Of an exception's long text, only the beginning of its first line is returned."""
    several = "ValueError: " + "long " * 100 + "\n  found [3]\nwanted [4]"
    cause = find_cause(PYTHON.replace("ModuleNotFoundError: No module named 'mine'", several))
    assert cause.startswith("ValueError: long long")
    assert cause.endswith(" ...")
    assert len(cause) <= 200


LOST = """An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collectAndServe.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 1 in stage 5.0 failed 2 \
times, most recent failure: Lost task 1.1 in stage 5.0 (TID 65) (localhost executor 7): \
ExecutorLostFailure (executor 7 exited caused by one of the running tasks) Reason: Container \
killed by YARN for exceeding physical memory limits.
Driver stacktrace:
\tat org.apache.spark.scheduler.DAGScheduler.abortStage(DAGScheduler.scala:2935)
"""
TOO_OFTEN = """An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collect.
: org.apache.spark.SparkException: Job aborted due to stage failure: ResultStage 5 (collect at \
job.py:3) has failed the maximum allowable number of times: 4. Most recent failure reason:
org.apache.spark.shuffle.MetadataFetchFailedException: Missing an output location for shuffle 2
\tat org.apache.spark.MapOutputTracker$.validateStatus(MapOutputTracker.scala:1770)
"""


def test_cause_of_failed_job_is_spark_reason() -> None:
    """The cause is Spark's reason for the failure, not the call of py4j in the first line."""
    assert find_cause(LOST) == (
        "ExecutorLostFailure (executor 7 exited caused by one of the running tasks) Reason: "
        "Container killed by YARN for exceeding physical memory limits."
    )
    assert find_cause(TOO_OFTEN) == (
        "Job aborted due to stage failure: ResultStage 5 (collect at job.py:3) has failed the "
        "maximum allowable number of times: 4."
    )


def test_sparkstrom_exceptions_are_not_shortened() -> None:
    """The text of sparkstrom's own exceptions is returned in full length."""
    ours = "sparkstrom.base.errors.UsageError: " + "why " * 100
    assert find_cause(PYTHON.replace("ModuleNotFoundError: No module named 'mine'", ours)) == (
        ours.strip()
    )


def test_failed_job_error_keeps_java_text_as_note() -> None:
    """The error of a failed job has one line; Java's whole text is a note of it."""

    class Exceptions:
        """The parts of py4j's Java exception that Py4JJavaError needs for its text."""

        _gateway_client = None
        _target_id = "o1"

    error = Py4JJavaError("An error occurred.", Exceptions())
    with (
        mock.patch.object(Py4JJavaError, "__str__", return_value=PYTHON),
        pytest.raises(TrainingError) as raised,
        translate_job_errors("evaluating"),
    ):
        raise error
    assert str(raised.value) == "evaluating failed: ModuleNotFoundError: No module named 'mine'"
    assert raised.value.__notes__ == [PYTHON]


def test_cause_without_known_exception_is_first_line() -> None:
    """Without a known kind of exception, the first line is returned."""
    assert find_cause("\nJob 3 cancelled\n\tat org.apache.spark.X\n") == "Job 3 cancelled"
    assert find_cause("") == "no reason given"
