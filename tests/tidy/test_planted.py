"""The corpus of planted bugs fits the sources: each can be planted, and says what catches it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.planted.corpus import Bug, bugs

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("bug", bugs(), ids=lambda bug: bug.name)
def test_it_can_be_planted(bug: Bug, tmp_path: Path) -> None:
    path = tmp_path / "sparkstrom" / bug.file
    path.parent.mkdir(parents=True)
    shutil.copy(ROOT / "sparkstrom" / bug.file, path)
    bug.plant(tmp_path)
    compile(path.read_text(), bug.file, "exec")
    assert bug.why
    assert bug.tests or bug.modes
    assert [test for test in bug.tests if not (ROOT / test).exists()] == []
