"""examples/export.py, as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_export_example_runs(tmp_path):
    options = "--master local-cluster[2,2,1024] --conf spark.ui.enabled=false "
    options += "--conf spark.driver.host=127.0.0.1 "
    options += f"--conf spark.sparkstrom.export_directory={tmp_path}/rows pyspark-shell"
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/export.py")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
        timeout=300,
        env=os.environ | {"PYSPARK_SUBMIT_ARGS": options, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"rows in {tmp_path}/rows/sparkstrom-" in done.stdout
    assert list((tmp_path / "rows").iterdir()) == []
