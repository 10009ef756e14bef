"""Short fuzz runs of each kind of file, after reading a valid one."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from tests.fuzz.files import KINDS, MEMORY_BYTES_MAX, fuzz

MUTATIONS = 60


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_mutated_file_raises_only_declared_errors_with_file_name(name: str, tmp_path: Path) -> None:
    """Mutated files raise only declared errors, whose text has the file's name."""
    KINDS[name].make(tmp_path)
    KINDS[name].load(tmp_path)
    (tmp_path / "mutated").mkdir()
    tracemalloc.start()
    try:
        outcomes = fuzz(name, MUTATIONS, seed=3, root=tmp_path / "mutated")
        assert tracemalloc.get_traced_memory()[1] < MEMORY_BYTES_MAX
    finally:
        tracemalloc.stop()
    assert outcomes.total() == MUTATIONS
