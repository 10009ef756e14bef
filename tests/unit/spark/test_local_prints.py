"""Tests where Spark itself shows workers' output in the driver program's terminal or notebook."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from sparkstrom.spark import classic_application
from sparkstrom.spark.classic_application import ClassicApplication


def application(master: str, launched: object = object()) -> ClassicApplication:
    context = SimpleNamespace(master=master, _gateway=SimpleNamespace(proc=launched))
    return ClassicApplication(context)


@pytest.mark.parametrize(
    ("master", "has"),
    [
        ("local", True),
        ("local[2]", True),
        ("local[*,4]", True),
        ("local-cluster[2,2,1024]", False),
        ("spark://local:7077", False),
        ("yarn", False),
    ],
)
def test_local_mode_shows_what_workers_print(master: str, has: bool) -> None:
    """Workers' output is in the program's terminal only in local mode, not on clusters."""
    assert application(master).has_workers_output is has


@pytest.mark.parametrize(
    ("launched", "watches", "has"),
    [(object(), object(), True), (object(), None, False), (None, object(), False)],
)
def test_a_cell_shows_it_where_the_kernel_reads_what_the_jvm_writes(
    monkeypatch: pytest.MonkeyPatch, launched: Any, watches: Any, has: bool
) -> None:
    """A notebook shows workers' output if its kernel reads the descriptor and started the JVM."""
    monkeypatch.setattr(classic_application, "is_in_notebook", lambda: True)
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(watch_fd_thread=watches))
    assert application("local[2]", launched).has_workers_output is has
