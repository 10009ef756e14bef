"""Tests of whole fits on Spark with a GPU, in a separate program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from sparkstrom.encoding.cuda.device import SIMULATED, is_usable

if SIMULATED or not is_usable() or not torch.cuda.is_available():
    pytest.skip("no GPU that torch and Numba see", allow_module_level=True)


def run(case: str) -> dict[str, Any]:
    """Run a case of ``spark_fits`` and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.gpu.spark_fits", case],
        env=os.environ | {"SPARK_LOCAL_IP": "127.0.0.1", "SPARKSTROM_RUNS": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "parameters stay on the host" not in done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize(
    "case",
    [
        "adam", "momentum", "large", "mesh_of_two", "averaging", "killed_worker", "resumed",
        "estimator",
    ],
)  # fmt: skip
def test_fit_on_gpu_has_equal_replicas_and_learns(case: str) -> None:
    result = run(case)
    assert result["replicas_equal"]
    assert result.get("minibatches_missing", 0) == 0
    assert result["accuracy"] > 0.95
    assert result.get("killed", 1) == 1
    assert result.get("evaluated", 1.0) > 0.95
    assert result.get("second", result)["replicas_equal"]


def test_rehearsal_measures_steps_on_gpu() -> None:
    """A rehearsal measures steps on the GPU; the loss raises in tasks on another device."""
    assert "A step takes" in run("measured_rehearsal")["conditions"][1]
