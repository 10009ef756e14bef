"""Test of Ctrl-C during a fit: it keeps what was learned, ends jobs, and later fits succeed."""

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


@pytest.mark.slow
def test_ctrl_c(tmp_path):
    """After each of three interrupted fits, another fit in the same session succeeds."""
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
            process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    print(program.said())
    assert process.returncode == 0
    assert "reentrant" not in program.said()
    assert "Traceback" not in program.said()
