"""Tests of ``sparkstrom report``: the written page, the choice of the log, and wrong calls."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from sparkstrom.cli.main import main
from tests.unit.observe.run_logs import REAL, read_real_log, write_log


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return Path(shutil.copy(REAL, tmp_path / "run.jsonl"))


def test_page_is_written_to_output_option_or_beside_log(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page is written to -o, by default next to the log; its path is printed."""
    page = tmp_path / "page.html"
    assert main(["report", str(log), "-o", str(page)]) == 0
    assert capsys.readouterr().out == f"{page}\n"
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert main(["report", str(log)]) == 0
    assert log.with_suffix(".html").read_text() == page.read_text()


def test_newest_log_of_directory_is_used(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a directory, given or in SPARKSTROM_RUNS, the newest log is taken."""
    older = write_log(tmp_path / "older.jsonl", read_real_log()[:5])
    os.utime(older, (1, 1))
    (tmp_path / "removed.jsonl").symlink_to(tmp_path / "elsewhere.jsonl")
    (tmp_path / "directory.jsonl").mkdir()
    assert main(["report", str(tmp_path)]) == 0
    assert log.with_suffix(".html").exists()
    log.with_suffix(".html").unlink()
    monkeypatch.setenv("SPARKSTROM_RUNS", str(tmp_path))
    assert main(["report"]) == 0
    assert log.with_suffix(".html").exists()


def test_fit_option_selects_one_fit(tmp_path: Path) -> None:
    """With --fit, the page shows only this fit."""
    log = write_log(tmp_path / "run.jsonl", read_real_log() * 2)
    assert main(["report", str(log), "--fit", "1"]) == 0
    page = log.with_suffix(".html").read_text()
    assert "Fit 1:" in page
    assert "Fit 2:" not in page


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["none.jsonl"], "none.jsonl cannot be read"),
        (["empty.jsonl"], "empty.jsonl is empty"),
        (["."], "holds no run log"),
        (["run.log", "-o", "run.log"], "is the log itself"),
        (["run.log", "-o", "nowhere/page.html"], "cannot be written"),
        (["run.log", "--fit", "2"], "has 1 fit"),
    ],
)
def test_wrong_call_exits_with_2_and_keeps_log(
    arguments: list[str],
    why: str,
    log: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A wrong call exits with code 2 and one message, and the log is not changed."""
    monkeypatch.chdir(log.parent)
    Path("empty.jsonl").touch()
    log.rename("run.log")
    if arguments == ["."]:
        Path("empty.jsonl").unlink()
    before = Path("run.log").read_bytes()
    assert main(["report", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("sparkstrom report: ")
    assert why in said
    assert Path("run.log").read_bytes() == before
