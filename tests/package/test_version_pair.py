"""Tests of scripts/version_matrix.py, with a Spark and a CPython other than the suite's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.version_matrix import Outcome, Pair, StepFailed, interpreter, main, table

ROOT = Path(__file__).parents[2]
PAIR = "3.12/4.x"  # the suite itself runs on `python3` and PYSPARK_VERSION: 3.11 and 4.0
LIMIT_S = 1200


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_the_newest_spark_on_another_python_trains_to_equal_replicas() -> None:
    pytest.importorskip("build")
    try:
        interpreter(PAIR.partition("/")[0])
    except StepFailed as error:
        pytest.skip(str(error))
    command = [sys.executable, "-m", "scripts.version_matrix", PAIR]
    # Few of the thousands of modules are imported; these are compiled at their import.
    environment = os.environ | {"PIP_COMPILE": "0", "PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    row = done.stdout.splitlines()[-1]
    assert row.startswith("| 3.12."), row
    assert "built-in, jax" in row


def test_table_shows_first_line_of_failure() -> None:
    good = Outcome(
        Pair("3.12", "4.0"), {"CPython": "3.12.1", "torch": "2"}, ("built-in", "PyTorch")
    )
    bad = Outcome(Pair("3.13", "3.5"), {}, (), "pip ended with 1:\nno such package")
    assert table([good, bad])[2:] == [
        "| 3.12.1 |  |  |  |  | built-in, torch 2 |",
        "| 3.13 |  |  |  |  | **failed**: pip ended with 1: |",
    ]


def test_unknown_version_pair_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["3.10/4.0"])
    assert "'3.10/4.0' is none of 3.11/3.5" in capsys.readouterr().err


def test_missing_python_error_names_version() -> None:
    with pytest.raises(StepFailed, match=r"no CPython 3\.99 here"):
        interpreter("3.99")
