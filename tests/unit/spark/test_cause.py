"""Spark's errors are long; people need one line of them."""

from __future__ import annotations

from sparkstrom.spark.driver.fitting import cause_of

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


def test_without_one_the_first_line_stands() -> None:
    assert cause_of("\nJob 3 cancelled\n\tat org.apache.spark.X\n") == "Job 3 cancelled"
    assert cause_of("") == "no reason given"
