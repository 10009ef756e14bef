"""Ctrl-C keeps what was learnt, ends the workers, and leaves a session that can fit again."""

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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "controller"), [("start", "driver"), ("training", "driver"), ("training", "executor")]
)
def test_ctrl_c_at(when, controller, tmp_path):
    said = tmp_path / "stderr"
    with said.open("w") as stderr:
        program = subprocess.Popen(
            [sys.executable, str(JOB), when, controller],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=tmp_path,
            env=os.environ | {"SPARKSTROM_RUNS": str(tmp_path / "runs")},
            start_new_session=True,  # as a shell gives a job a process group of its own
        )
    try:
        assert program.stdout is not None
        while (line := program.stdout.readline()) and "READY" not in line:
            pass
        assert "READY" in line, said.read_text()
        began_s = time.monotonic()
        os.killpg(program.pid, signal.SIGINT)
        rest, _ = program.communicate(timeout=LIMIT_S)
    finally:
        program.kill()
    text = said.read_text()
    assert program.returncode == 0, text
    found = json.loads(rest.splitlines()[-1])
    print(when, controller, found, f"{time.monotonic() - began_s:.1f} s", text)
    assert found["jobs_gone_s"] < GONE_S
    assert (found["moved"] > 1e-3) == (when == "training")  # less is rounding to the grid
    if when == "training":
        assert found["saved"]
    assert found["equal_afterwards"]
    assert found["minibatches"][0] == found["minibatches"][1] == 40
    assert "reentrant" not in text
    assert "Traceback" not in text
