"""The laws of encoding on a device hold in Numba's simulator, in a process of its own.

Numba chooses between device and simulator when it is imported, once per process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PASSED = 80  # at least so many, so that skipping all of them is no success


def test_kernels_for_cuda_under_the_simulator() -> None:
    if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
        pytest.skip("all of this run is simulated: tests/gpu has run by itself")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed = next(line for line in reversed(done.stdout.splitlines()) if " passed" in line)
    assert int(passed.split(" passed")[0].split()[-1]) >= PASSED
