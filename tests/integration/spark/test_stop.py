"""Test of ``spark.stop()``: media drivers end with Spark, and later calls are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

JOB = Path(__file__).parent / "stopped_job.py"
LIMIT_S = 300.0


@pytest.mark.slow
def test_nothing_outlives_spark_and_what_needs_it_says_so(tmp_path: Path) -> None:
    """All media drivers end with Spark, and calls that need Spark raise UsageError."""
    done = subprocess.run(
        [sys.executable, str(JOB)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=LIMIT_S,
        start_new_session=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen, after_fit, after_stop, gone_s, refused = json.loads(done.stdout.splitlines()[-1])
    print(seen, after_fit, after_stop, gone_s)
    assert "driver" in seen
    assert len(seen) == 3  # and one per executor
    assert "driver" not in after_fit  # the driver program's ends with its fit
    assert after_stop == []
    assert len(refused) == 4  # fit, predict, evaluate, another network; not close()
    assert all("the Spark session was stopped" in text for text in refused)
