"""Tests where Spark itself shows workers' output in the driver program's terminal or notebook."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from sparkstrom.spark import classic_application
from sparkstrom.spark.classic_application import ClassicApplication


def make_application(master: str, launched: object = object()) -> ClassicApplication:
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
def test_workers_output_is_in_terminal_only_in_local_mode(master: str, has: bool) -> None:
    """Workers' output is in the program's terminal only in local mode, not on clusters."""
    assert make_application(master).has_workers_output is has


@pytest.mark.parametrize(
    ("launched", "watches", "has"),
    [(object(), object(), True), (object(), None, False), (None, object(), False)],
)
def test_notebook_shows_workers_output_if_kernel_reads_jvm_output(
    monkeypatch: pytest.MonkeyPatch, launched: Any, watches: Any, has: bool
) -> None:
    """A notebook shows workers' output if its kernel reads the descriptor and started the JVM."""
    monkeypatch.setattr(classic_application, "is_in_notebook", lambda: True)
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(watch_fd_thread=watches))
    assert make_application("local[2]", launched).has_workers_output is has
