"""Tests of a doctor whose Spark session stops during the examination; and of the kernel cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparkstrom.base.cache_directory import VARIABLE
from sparkstrom.spark.doctor import examination as examining
from sparkstrom.spark.doctor import host_facts
from sparkstrom.spark.doctor.checks import Level
from sparkstrom.spark.doctor.examination import ExaminationOptions, examine
from sparkstrom.spark.doctor.host_facts import find_kernel_cache


class Stopped:
    """A session that Spark has stopped because its master never answered."""

    def __init__(self, master: str | None, conf: Any) -> None:
        self.conf = dict(conf)

    def __enter__(self) -> Stopped:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def java_version(self) -> str:
        raise RuntimeError("java.lang.IllegalStateException: Cannot call methods on a stopped")


def test_a_master_that_does_not_answer_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examining, "check_installation", lambda: None)
    monkeypatch.setattr(examining, "DoctorSession", Stopped)
    report = examine(ExaminationOptions("spark://nohost:7077", {}, 1.0), lambda text: None)
    assert not report.ok
    (found,) = report.findings
    assert found.level is Level.FAILURE
    assert "spark://nohost:7077" in found.remedy


def test_compiled_kernels_are_looked_for_where_they_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Compiled kernels are found in the directory of the environment variable."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert find_kernel_cache() == (tmp_path, False)
    (tmp_path / "sparkstrom.encoding.gaps-0123.kernels").touch()
    assert find_kernel_cache() == (tmp_path, True)


def test_a_host_without_a_directory_for_kernels_has_an_unwritable_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before, the doctor tested the scratch directory, where a fit stores no kernels."""

    def refuse(environ: object) -> Path:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(host_facts, "kernel_directory", refuse)
    monkeypatch.delenv(VARIABLE, raising=False)
    assert find_kernel_cache() == (Path("/var/tmp"), False)
