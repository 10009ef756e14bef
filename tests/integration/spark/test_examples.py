"""The examples run as their users run them, and reach the accuracy that they want."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def submitted(example: str) -> subprocess.CompletedProcess[str]:
    """By spark-submit, on two executors with two slots each."""
    import pyspark

    command = [str(Path(pyspark.__path__[0]) / "bin/spark-submit"), "--master"]
    command += ["local-cluster[2,2,1024]", "--conf", "spark.ui.enabled=false"]
    environment = os.environ | {
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    return subprocess.run(
        [*command, str(ROOT / "examples" / example)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(
    ("example", "needs"), [("torch_digits.py", "torch"), ("jax_digits.py", "jax")]
)
def test_an_example(example: str, needs: str) -> None:
    pytest.importorskip(needs, reason=f"{needs} is not here: pip install 'sparkstrom[{needs}]'")
    done = submitted(example)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "held-out accuracy" in done.stdout
