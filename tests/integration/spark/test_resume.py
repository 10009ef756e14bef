"""Test of a driver program that is killed at random moments and resumes if it is started again.

``SPARKSTROM_KILLS`` is the number of kills and the random seed; the default is 3.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.integration.checkpoint.checkpoint_progress import read_checkpoint_progress
from tests.integration.spark.killed_driver_job import BATCH, EPOCHS

JOB = Path(__file__).parent / "killed_driver_job.py"
KILLS = int(os.environ.get("SPARKSTROM_KILLS", "3"))
LIMIT_S = 240.0
ROWS = 1797


def start(directory: Path, said: Path) -> subprocess.Popen[str]:
    with said.open("a") as stderr:
        return subprocess.Popen(
            [sys.executable, str(JOB), str(directory), str(directory.with_name("digits.npz"))],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=directory.parent,
            env=os.environ | {"SPARKSTROM_RUNS": "", "OMP_NUM_THREADS": "1"},
        )


def kill_after(program: subprocess.Popen[str], word: str, seconds: float) -> None:
    """Kill the program some seconds after it printed the word, unless it has ended before."""
    with program:  # waits for its end
        assert program.stdout is not None
        while (line := program.stdout.readline()) and word not in line:
            pass
        time.sleep(seconds)  # a random moment, not an event
        program.send_signal(signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(4 * 60 * KILLS + 300)
def test_killed_driver_program_resumes_newest_checkpoint(tmp_path, digits):
    """The last run resumes the newest checkpoint and trains each remaining row once."""
    chance = random.Random(KILLS)
    directory, said = tmp_path / "checkpoints", tmp_path / "stderr"
    parts = (digits.features, digits.labels), digits.held_out
    features, labels = map(np.concatenate, zip(*parts, strict=True))
    np.savez(tmp_path / "digits.npz", features=features, labels=labels)
    kills = 0
    while kills < KILLS or not any(directory.glob("*.npz")):  # else nothing is resumed
        kills += 1
        assert kills <= 4 * KILLS, "no run lived long enough to write a checkpoint"
        word, most_s = chance.choice((("BEGIN", 4.0), ("TRAINING", 3.0), ("TRAINING", 1.0)))
        kill_after(start(directory, said), word, chance.uniform(0.0, most_s))
    newest = max(directory.glob("*.npz"))
    with start(directory, said) as last:
        rest, _ = last.communicate(timeout=LIMIT_S)
    assert last.returncode == 0, said.read_text()
    found = json.loads(rest.splitlines()[-1])
    print(found, said.read_text())
    saved = read_checkpoint_progress(str(newest), BATCH)
    number = saved.fit
    assert found["fits"][number - 1]["resumed_from"] == str(newest)
    for index, (fit, epochs) in enumerate(zip(found["fits"], EPOCHS, strict=True), 1):
        assert fit["minibatches"] == fit["minibatches_expected"]
        assert fit["replicas_equal"]
        assert len(fit["history"]) == epochs
        if index == number and saved.is_finished:
            assert fit["minibatches_resumed"] < saved.minibatches  # its summary was saved, too
        elif index == number:
            assert fit["minibatches_resumed"] == saved.minibatches
            assert fit["examples"] == epochs * ROWS - saved.examples  # the rest, once each
        elif index > number:
            assert fit["resumed_from"] is None
            assert fit["examples"] == epochs * ROWS
    assert found["accuracy"] > 0.93
