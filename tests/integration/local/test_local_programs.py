"""Tests of programs on a machine without Spark: complete, interrupted and killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkstrom import ParallelWrapper
from sparkstrom.models import DenseNetwork
from sparkstrom.runtime.optimizer_states import decode_optimizer_state
from sparkstrom.transport.aeron.driver_directories import (
    ProcessIdentity,
    identify_process,
    is_process_alive,
)
from tests.integration.checkpoint.checkpoint_progress import read_checkpoint_progress

PROGRAM = Path(__file__).with_name("plain_program.py")
LIMIT_S = 120.0
GONE_S = 15.0


def start_program(what: str, directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), what],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=directory,
        env=os.environ | {"TMPDIR": str(directory)},
        start_new_session=True,  # in its own process group, like a shell's job
    )


def wait_for_workers(program: subprocess.Popen[str]) -> list[ProcessIdentity]:
    """Wait until the program trains; return its worker processes."""
    assert program.stdout is not None
    line = program.stdout.readline()
    assert line.startswith("READY"), line + program.communicate()[1]
    return [identify_process(int(pid)) for pid in line.split()[1:]]


def wait_for_result(program: subprocess.Popen[str]) -> dict:
    """Wait until the program has succeeded; return the JSON object that it printed."""
    out, error = program.communicate(timeout=LIMIT_S)
    assert program.returncode == 0, error
    assert "Traceback" not in error, error
    return json.loads(out.splitlines()[-1])


def updater_in_file(path: Path) -> dict[str, Any]:
    """Return the optimizer state in a checkpoint file."""
    with np.load(path) as file:
        return decode_optimizer_state(file["state"].tobytes())


def media_drivers(directory: Path) -> list[str]:
    """Return the ids of media drivers of programs that were started in this directory."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if "driver_process" in command and str(directory) in command:
            found.append(process.name)
    return found


@pytest.mark.slow
def test_program_without_spark_trains_torch_module(tmp_path: Path) -> None:
    found = wait_for_result(start_program("fits", tmp_path))
    print(found)
    assert found["equal"] == [True, True]
    assert found["hashes"] == [1, 1]
    assert found["minibatches"] == [200, 200]
    assert max(found["bytes_wire"]) < min(found["bytes_sent"]) / 2  # joins, but no updates
    assert found["accuracy"] > 0.9
    assert found["own"] > 0
    assert found["spark"] == []
    assert [path.name for path in tmp_path.glob("sparkstrom-local-*")] == []


@pytest.mark.slow
def test_ctrl_c_keeps_learned_parameters(tmp_path: Path) -> None:
    """Ctrl-C ends the workers; the learned parameters are in the wrapper and in a checkpoint."""
    program = start_program("interrupted", tmp_path)
    workers = wait_for_workers(program)
    os.killpg(program.pid, signal.SIGINT)
    found = wait_for_result(program)
    print(found)
    assert found["moved"] > 1e-3
    assert found["saved"]
    assert found["left"] == []
    assert found["equal"]
    assert not any(map(is_process_alive, workers))


@pytest.mark.slow
@pytest.mark.parametrize("redirected", ["2>&1 | head -1 >&2", "2>/dev/full", "2>&-"])
def test_fit_succeeds_with_unwritable_standard_error(redirected: str, tmp_path: Path) -> None:
    """A fit succeeds even if standard error is full, closed or a broken pipe."""
    program = (
        "import json, sys, numpy as np\n"
        "from pathlib import Path\n"
        "from sparkstrom import ParallelWrapper\n"
        "from sparkstrom.models import DenseNetwork\n"
        "x = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)\n"
        "with ParallelWrapper(DenseNetwork([4, 2]), 1, batch_size_per_worker=8) as wrapper:\n"
        "    before = wrapper.parameters\n"
        "    wrapper.fit((x, (x[:, 0] > 0).astype(int)), epochs=3, run_log='')\n"
        "    moved = float(np.abs(wrapper.parameters - before).max())\n"
        "Path('moved').write_text(str(moved))\n"
    )
    (tmp_path / "train.py").write_text(program)
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} train.py {redirected}"],
        cwd=tmp_path, env=os.environ | {"TMPDIR": str(tmp_path)}, check=False,
        capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert (tmp_path / "moved").exists(), done.stderr
    assert float((tmp_path / "moved").read_text()) > 1e-3


@pytest.mark.slow
def test_killed_program_leaves_no_workers_or_media_drivers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers and media drivers end with a killed program; the next wrapper removes its files."""
    program = start_program("killed", tmp_path)
    workers = wait_for_workers(program)
    assert media_drivers(tmp_path)
    program.kill()
    program.communicate()
    until_s = time.monotonic() + GONE_S
    while any(map(is_process_alive, workers)) or media_drivers(tmp_path):
        assert time.monotonic() < until_s, (workers, media_drivers(tmp_path))
        time.sleep(0.05)
    assert len(list(tmp_path.glob("sparkstrom-local-*"))) == 1
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with ParallelWrapper(DenseNetwork([2, 2]), 1, progress=False) as wrapper:
        assert list(tmp_path.glob("sparkstrom-local-*")) == [wrapper._context.scratch]


@pytest.mark.slow
def test_restarted_program_resumes_from_checkpoint(tmp_path: Path) -> None:
    """A restarted program trains the remaining minibatches, with Adam's state of the checkpoint."""
    program = start_program("kept", tmp_path)
    workers = wait_for_workers(program)
    program.kill()
    program.communicate()
    newest = max((tmp_path / "checkpoints").glob("*.npz"))
    saved, before = read_checkpoint_progress(str(newest), 8), updater_in_file(newest)
    assert 0 < saved.minibatches < 8 * 50
    found = wait_for_result(start_program("kept", tmp_path))
    print(found)
    assert found["resumed_from"] == str(newest)
    assert found["equal"]
    assert found["minibatches"] == [saved.minibatches, 8 * 50]
    assert found["examples"] == 8 * 400 - saved.examples
    assert not [text for text in found["warnings"] if "optimizer" in text]
    after = updater_in_file(max((tmp_path / "checkpoints").glob("*.npz")))
    assert 50 < after["steps"] - before["steps"] <= 8 * 25  # the state may have later steps
    assert not any(map(is_process_alive, workers))
