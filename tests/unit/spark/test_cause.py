"""Spark's errors are long; people need one line of them."""

from __future__ import annotations

from unittest import mock

import pytest

from sparkstrom.base.errors import TrainingError
from sparkstrom.spark.data.job_errors import cause_of, in_one_line

Py4JJavaError = pytest.importorskip("py4j.protocol", reason="it comes with pyspark").Py4JJavaError

PYTHON = """An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collectAndServe.
: org.apache.spark.SparkException: Job aborted: PythonException: Traceback (most recent call last):
  File "worker.py", line 2024, in main
    func = read_command(pickleSer, infile)
ModuleNotFoundError: No module named 'mine'

\tat org.apache.spark.api.python.BasePythonRunner.handlePythonException(PythonRunner.scala:581)
\tat java.base/java.lang.Thread.run(Thread.java:840)
"""


def test_a_python_exception_is_named_by_its_own_line() -> None:
    assert cause_of(PYTHON) == "ModuleNotFoundError: No module named 'mine'"


def test_an_exception_of_several_lines_is_its_first_one_and_not_all_of_it() -> None:
    several = "ValueError: " + "long " * 100 + "\n  found [3]\nwanted [4]"
    cause = cause_of(PYTHON.replace("ModuleNotFoundError: No module named 'mine'", several))
    assert cause.startswith("ValueError: long long")
    assert cause.endswith(" ...")
    assert len(cause) <= 200


def test_our_own_words_are_not_cut() -> None:
    ours = "sparkstrom.base.errors.UsageError: " + "why " * 100
    assert cause_of(PYTHON.replace("ModuleNotFoundError: No module named 'mine'", ours)) == (
        ours.strip()
    )


def test_a_job_that_fails_is_told_in_one_line_with_javas_behind_it() -> None:
    class Exceptions:
        """Enough of py4j's for its error to have words."""

        _gateway_client = None
        _target_id = "o1"

    error = Py4JJavaError("An error occurred.", Exceptions())
    with (
        mock.patch.object(Py4JJavaError, "__str__", return_value=PYTHON),
        pytest.raises(TrainingError) as raised,
        in_one_line("evaluating"),
    ):
        raise error
    assert str(raised.value) == "evaluating failed: ModuleNotFoundError: No module named 'mine'"
    assert raised.value.__notes__ == [PYTHON]


def test_without_one_the_first_line_stands() -> None:
    assert cause_of("\nJob 3 cancelled\n\tat org.apache.spark.X\n") == "Job 3 cancelled"
    assert cause_of("") == "no reason given"
