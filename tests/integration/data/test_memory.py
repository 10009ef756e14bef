"""Test of peak memory, in a separate process: training on data of twenty times the limit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

MIB = 1 << 20

PROGRAM = """
import sys
from pathlib import Path
import numpy as np
from sparkstrom.models import DenseNetwork
from sparkstrom.data.row_store import Batches
from sparkstrom.data.row_store import RowStore
from sparkstrom.data.row_blocks import distribute_rows
from sparkstrom.data.row_blocks import read_row_blocks, check_block

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10

def rows(count):
    chance = np.random.default_rng(0)
    for _ in range(count // 1024):
        features = chance.random((1024, 1024), np.float32)
        yield from zip(features, (features[:, 0] > 0.5).astype(int).tolist())

def train(limit, count):
    store = RowStore(limit, Path(sys.argv[2]), seed=1, fraction=0.1)
    for _, dealt in distribute_rows(read_row_blocks, 1, 0, 0, rows(count)):
        if dealt.block is not None:
            check_block(model, dealt.block)
            store.add(dealt.block.form, dealt.block.records)
    batches = Batches.from_store(store.finish(), batch_rows=256, seed=1, partition=0)
    trained = sum(model.step(batches.get(0, i)) >= 0 for i in range(batches.batches_per_epoch))
    assert trained == batches.batches_per_epoch
    assert batches.rows + batches.held_out.rows == count
    assert list(Path(sys.argv[2]).iterdir()) == []
    batches.close()
    return batches.spilled_bytes

limit = int(sys.argv[1])
model = DenseNetwork([1024, 2])
model.bind(model.initial())
train(limit, 2048)
before = peak()
count = 1024 * (20 * limit // (1024 * 4104) + 1)
train(limit, count)
print(peak() - before, count * 4104)
"""


def test_training_beyond_memory_limit_keeps_peak_memory_low(tmp_path: Path) -> None:
    """Training on rows of twenty times the limit adds less than twice the limit to peak memory."""
    limit = 16 * MIB
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(limit), str(scratch)],
        env=os.environ | threads,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    grown, data = map(int, done.stdout.split())
    assert data >= 20 * limit
    assert grown < 2 * limit, f"peak memory grew by {grown / MIB:.0f} MiB"
