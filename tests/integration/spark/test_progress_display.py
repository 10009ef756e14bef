"""Tests of a fit's progress display: on a terminal with Spark's own bar, and in a notebook."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest

HERE = Path(__file__).parent
PROGRAM = HERE / "watched_fit.py"
COLUMNS = 120


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    root = str(HERE.parents[2])
    return {**os.environ, "TERM": "xterm", "PYTHONPATH": f"{root}{os.pathsep}{path}"}


def run_in_terminal(command: list[str]) -> str:
    """Run a program in its own terminal; return all that it writes."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    with Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment()) as program:
        os.close(theirs)
        parts = []
        try:
            while part := os.read(ours, 65536):
                parts.append(part)
        except OSError:  # on Linux, the other end is closed
            pass
        finally:
            os.close(ours)
    text = b"".join(parts).decode()
    assert program.returncode == 0, text
    return text


@pytest.mark.slow
def test_terminal_shows_one_progress_bar_in_place() -> None:
    """On a terminal, one progress bar is drawn in place and ends with a new line."""
    text = run_in_terminal([sys.executable, str(PROGRAM), "15"])
    drawn = re.findall(r"\r\x1b\[J([^\r\n]+)\r", text)
    assert any(each.startswith("sparkstrom: starting 2 Python workers") for each in drawn)
    bars = [each for each in drawn if "%|" in each]
    assert len(bars) > 5
    assert max(map(len, drawn)) < COLUMNS
    percents = [int(match[1]) for each in bars if (match := re.search(r"(\d+)%\|", each))]
    assert percents == sorted(percents)
    assert bars[-1].startswith("done 100%|█")
    assert "loss " in bars[-1]
    assert "2/2 workers" in bars[-1]
    last = text.index(bars[-1], text.rindex("done 100%|"))
    assert "\n" in text[last:].split("all done")[0]  # later output is on a new line
    for line in text.replace("\r\n", "\n").split("\n"):  # bars are overwritten, except the last one
        visible = line.rstrip("\r").split("\r")[-1]
        assert "%|" not in visible or visible.endswith(bars[-1])


@pytest.mark.slow
def test_notebook_shows_one_progress_bar_in_place(monkeypatch: Any) -> None:
    """In a notebook, one bar is updated in place, and other output has no control characters."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    cells = ["import logging; logging.basicConfig()", "from watched_fit import fit; fit(15)"]
    made = [nbformat.v4.new_code_cell(each) for each in cells]
    notebook = nbformat.v4.new_notebook(cells=made)
    seen: list[str] = []
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", allow_errors=False
    )
    original = client.process_message

    def process(msg: Any, cell: Any, index: int) -> Any:
        if msg["msg_type"] in ("display_data", "update_display_data"):
            seen.append(msg["content"]["data"]["text/plain"])
        return original(msg, cell, index)

    monkeypatch.setattr(client, "process_message", process)
    client.execute()
    outputs = notebook.cells[1].outputs
    (bar,) = (one for one in outputs if one.output_type == "display_data")
    assert bar.data["text/plain"].startswith("sparkstrom: done 100%  epoch 15.0/15  loss ")
    assert 'aria-valuenow="100.0"' in bar.data["text/html"]
    assert seen[0].startswith("sparkstrom: starting 2 Python workers")
    assert len(seen) > 5
    text = "".join(one.text for one in outputs if one.output_type == "stream")
    ours = [line for line in text.splitlines() if "sparkstrom" in line]
    assert all(line.startswith(("sparkstrom ", "WARNING:sparkstrom")) for line in ours)
    assert "\r" not in text
    assert "\x1b" not in text
