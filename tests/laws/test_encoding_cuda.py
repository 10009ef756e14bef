"""The laws of encoding hold on a device, which Numba's simulator replaces, in a process of its own.

Numba chooses between device and simulator when it is imported, once per process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(1600)

ROOT = Path(__file__).parents[2]
LIMIT_S = 1500.0  # the simulator takes 40 s alone, and many times that on a busy machine
PASSED = 80  # so many must pass at least: skipped tests are not success
ON_DEVICE_MEMORY = (  # tests that also run on the host, here in device memory (``memories``)
    "test_theta.py",
    "test_replica.py",
    "test_replica_measure.py",
    "test_layered.py",
    "test_interleavings.py",
    "test_trainer.py",
)


def run_tests_under_simulator(*arguments: str) -> int:
    """Run tests in a process under the simulator, and return how many passed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1"}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    line = next(line for line in reversed(done.stdout.splitlines()) if " passed" in line)
    return int(line.split(" passed")[0].split()[-1])


@pytest.mark.skipif(
    os.environ.get("NUMBA_ENABLE_CUDASIM") == "1",
    reason="all of this run is simulated: these tests have run by themselves",
)
@pytest.mark.parametrize(
    ("arguments", "least"),
    [
        pytest.param(("tests/gpu",), PASSED, marks=pytest.mark.slow, id="kernels and encoders"),
        pytest.param(
            ("-p", "tests.gpu.conftest", *(f"tests/unit/runtime/{f}" for f in ON_DEVICE_MEMORY)),
            100,
            id="theta and replicas",
        ),
    ],
)
def test_device_tests_pass_under_numba_simulator(arguments: tuple[str, ...], least: int) -> None:
    assert run_tests_under_simulator(*arguments) >= least
