"""examples/pipeline.py, as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_pipeline_example_runs(tmp_path):
    options = "--master local-cluster[2,2,1024] --conf spark.ui.enabled=false "
    options += "--conf spark.driver.host=127.0.0.1 pyspark-shell"
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/pipeline.py"), str(tmp_path / "saved")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
        env=os.environ | {"PYSPARK_SUBMIT_ARGS": options, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "held out: 0.9" in done.stdout
    assert (tmp_path / "saved/metadata").is_dir()
