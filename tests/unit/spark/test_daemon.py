"""Tests of the Python daemon of executors: its imports, random numbers, and its output to Spark."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from sparkstrom.spark.daemon import PRELOAD_VARIABLE, preload


def test_preload_reports_missing_modules() -> None:
    """``preload`` imports modules and returns a message for each that is missing."""
    sys.modules.pop("wave", None)
    (problem,) = preload(["wave", "no_such_module"])
    assert "wave" in sys.modules
    assert problem.startswith("no_such_module cannot be imported: ModuleNotFoundError")


def test_a_module_that_raises_does_not_end_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raises_at_import.py").write_text("raise RuntimeError('no licence')")
    monkeypatch.syspath_prepend(str(tmp_path))
    (problem,) = preload(["raises_at_import"])
    assert problem == "raises_at_import cannot be imported: RuntimeError: no licence"


@pytest.mark.parametrize("name", ["jax", "jax.numpy", "keras"])
def test_modules_with_threads_are_not_imported(name: str) -> None:
    (problem,) = preload([name])
    assert problem == f"{name} starts threads, which a forked worker lacks; leave it out"


def test_workers_draw_different_random_numbers() -> None:
    """Workers reseed NumPy's generator; processes that a worker forks keep the worker's state."""
    script = """
import multiprocessing, os
import numpy as np
from sparkstrom.spark import daemon
from pyspark import daemon as sparks
def numbers(queue):
    queue.put([np.random.rand() for _ in range(2)])
def draw(queue):
    child = multiprocessing.get_context("fork").Process(target=numbers, args=(queue,))
    child.start(); child.join()
    numbers(queue)
def manager():
    fork, found = multiprocessing.get_context("fork"), []
    for _ in range(2):
        queue = fork.SimpleQueue()
        worker = fork.Process(target=draw, args=(queue,))
        worker.start(); worker.join()
        found.append((queue.get(), queue.get()))
    print([child == own for child, own in found], found[0][0] == found[1][0])
daemon.WORKER_MODULES = ()
sparks.manager = manager
daemon.main()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[True, True] False"


def test_daemon_output_is_only_its_port(tmp_path: Path) -> None:
    """The daemon's output is only its port, even if a preloaded module prints."""
    text = "import os; print('hello'); os.write(1, b'you\\n')"
    (tmp_path / "prints_at_import.py").write_text(text)
    paths = [str(tmp_path), str(Path(__file__).parents[3])]
    with subprocess.Popen(
        [sys.executable, "-m", "sparkstrom.spark.daemon", "pyspark.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(paths), PRELOAD_VARIABLE: "prints_at_import, no_such"},
    ) as daemon:
        out, err = daemon.communicate(timeout=120)
    assert 0 < struct.unpack("!i", out)[0] < 65536
    assert b"hello" in err
    assert b"you" in err
    (line,) = [line for line in err.splitlines() if line.startswith(b"sparkstrom.spark.daemon")]
    assert line.startswith(b"sparkstrom.spark.daemon: no_such cannot be imported")
