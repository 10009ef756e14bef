"""The examples run as their users run them, and reach the accuracy that they want."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ONE_EXECUTOR = "local-cluster[1,2,1024]"  # which two fits at a time share, or a fit's two workers
TWO_EXECUTORS = "local-cluster[2,1,1024]"
FOUR_WORKERS = "local-cluster[2,2,1024]"


def submitted(example: str, *arguments: str, master: str, **conf: str) -> str:
    """What it prints, by spark-submit, with the settings for a laptop."""
    import pyspark

    command = [str(Path(pyspark.__path__[0]) / "bin/spark-submit"), "--master", master]
    command += ["--properties-file", "conf/laptop.conf", "--conf", "spark.driver.host=127.0.0.1"]
    for name, value in conf.items():
        command += ["--conf", f"spark.sparkstrom.{name}={value}"]
    environment = os.environ | {
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    done = subprocess.run(
        [*command, f"examples/{example}", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


def test_digits() -> None:
    assert "held-out accuracy" in submitted("digits.py", "--epochs", "40", master=FOUR_WORKERS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "needs"),
    [
        ("torch_digits.py", "torch"),
        ("jax_digits.py", "jax"),
        ("lightning_digits.py", "pytorch_lightning"),
        ("hf_tokens.py", "transformers"),
    ],
)
def test_other_peoples_models(example: str, needs: str) -> None:
    pytest.importorskip(needs, reason=f"{needs} is not here: the tests' extra has it")
    assert "held-out accuracy" in submitted(example, master=TWO_EXECUTORS)


@pytest.mark.slow
def test_export(tmp_path: Path) -> None:
    directory = f"{tmp_path}/rows"
    printed = submitted("export.py", master=ONE_EXECUTOR, export_directory=directory)
    assert f"rows in {directory}/sparkstrom-" in printed
    assert list((tmp_path / "rows").iterdir()) == []


@pytest.mark.slow
def test_pipeline(tmp_path: Path) -> None:
    printed = submitted("pipeline.py", str(tmp_path / "saved"), master=ONE_EXECUTOR)
    assert "held out: 0.9" in printed
    assert "seconds of the last fit: " in printed
    assert (tmp_path / "saved/metadata").is_dir()
