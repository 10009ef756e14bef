"""Test of Ctrl-C during a fit, after which other fits succeed, and of ``spark.stop()``.

Ctrl-C keeps what was learned and ends jobs; with Spark, media drivers end, and calls are refused.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

JOB = Path(__file__).parent / "interrupted_job.py"
GONE_S = 5.0
LIMIT_S = 240.0
FITS = [("start", "driver"), ("training", "driver"), ("training", "executor")]


class Program:
    """The driver program and its output."""

    def __init__(self, folder: Path) -> None:
        self._said = folder / "stderr"
        with self._said.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, str(JOB), *map(":".join, FITS)],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd=folder,
                env=os.environ | {"SPARKSTROM_RUNS": str(folder / "runs")},
                start_new_session=True,  # in its own process group, like a shell's job
            )

    def said(self) -> str:
        return self._said.read_text()

    def line_with(self, text: str) -> str:
        """Return the program's next line that contains the text."""
        assert self.process.stdout is not None
        while (line := self.process.stdout.readline()) and text not in line:
            pass
        assert text in line, self.said()
        return line


def check_stopped(found):
    """Check that all media drivers ended with Spark, and that calls that need Spark are refused."""
    assert "driver" in found["seen"]
    assert len(set(found["seen"])) == 2  # and the executor, with that of the fit before, too
    assert "driver" not in found["after_fit"]  # the driver program's ends with its fit
    assert found["after_stop"] == []
    assert len(found["refused"]) == 4  # fit, predict, evaluate, another network; not close()
    assert all("the Spark session was stopped" in text for text in found["refused"])


@pytest.mark.slow
def test_fits_work_after_ctrl_c_and_nothing_outlives_spark(tmp_path):
    """After each of three interrupted fits, another fit succeeds; nothing outlives Spark."""
    program = Program(tmp_path)
    with program.process as process:
        try:
            for when, controller in FITS:
                program.line_with("READY")
                began_s = time.monotonic()
                os.killpg(process.pid, signal.SIGINT)
                found = json.loads(program.line_with("jobs_gone_s"))
                print(when, controller, found, f"{time.monotonic() - began_s:.1f} s")
                assert found["jobs_gone_s"] < GONE_S
                # Smaller changes result from rounding to the grid.
                assert (found["moved"] > 1e-3) == (when == "training")
                if when == "training":
                    assert found["saved"]
                assert found["equal_afterwards"]
                assert found["minibatches"][0] == found["minibatches"][1] == 42
            check_stopped(json.loads(program.line_with("after_stop")))
            process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    print(program.said())
    assert process.returncode == 0
    assert "reentrant" not in program.said()
    assert "Traceback" not in program.said()
