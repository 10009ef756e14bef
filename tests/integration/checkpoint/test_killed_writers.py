"""Test of processes that are killed while they write: the last reported checkpoint is intact."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sparkstrom.checkpoint.directory import CheckpointDirectory

PROGRAM = """
import sys
import numpy as np
from sparkstrom.checkpoint.directory import CheckpointDirectory
from sparkstrom.checkpoint.files import Checkpoint
directory = CheckpointDirectory(sys.argv[1], 2)
newest = directory.read_newest(lambda text: sys.exit(text))
number = newest[1].description["number"] if newest else 0
while True:
    number += 1
    arrays = {"theta": np.full(200_000, number), "m": np.full(50_000, -number)}
    directory.write(Checkpoint({"number": number}, arrays))
    print(number, flush=True)
    directory.remove_old()
"""


@pytest.mark.slow
def test_killed_writer_leaves_newest_checkpoint_intact(tmp_path: Path) -> None:
    """After a kill, the newest checkpoint is complete and not older than the last reported one."""
    moments, reported = random.Random(14), 0
    for _ in range(6):
        with subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as writer:
            assert writer.stdout is not None
            assert writer.stderr is not None
            first = writer.stdout.readline()
            threading.Event().wait(moments.uniform(0, 0.1))
            writer.send_signal(signal.SIGKILL)
            lines = [first, *writer.stdout.readlines()]
            assert writer.stderr.read() == ""
        newest = CheckpointDirectory(tmp_path).read_newest(pytest.fail)
        assert newest is not None
        number = newest[1].description["number"]
        assert number >= int([line for line in lines if line.endswith("\n")][-1]) > reported
        assert (newest[1].arrays["theta"] == number).all()
        assert (newest[1].arrays["m"] == -number).all()
        reported = number
    CheckpointDirectory(tmp_path).write(newest[1])
    assert all(file.name.startswith("checkpoint-") for file in tmp_path.iterdir())
