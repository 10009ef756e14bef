"""Tests of a doctor whose Spark session stops during the examination; and of the kernel cache."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkstrom.base.cache_directory import VARIABLE
from sparkstrom.base.errors import SetupError
from sparkstrom.fit.fit_context import TaskSlots
from sparkstrom.spark.doctor import examination as examining
from sparkstrom.spark.doctor import host_facts
from sparkstrom.spark.doctor.checks import Level, Report, UdpLink
from sparkstrom.spark.doctor.examination import ExaminationOptions, _Examination, examine
from sparkstrom.spark.doctor.host_facts import find_kernel_cache


class StoppedSession:
    """A session that Spark has stopped because its master never answered."""

    def __init__(self, master: str | None, conf: Any) -> None:
        self.conf = dict(conf)

    def __enter__(self) -> StoppedSession:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def java_version(self) -> str:
        raise RuntimeError("java.lang.IllegalStateException: Cannot call methods on a stopped")


def test_spark_master_without_answer_is_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examining, "check_installation", lambda: None)
    monkeypatch.setattr(examining, "DoctorSession", StoppedSession)
    report = examine(ExaminationOptions("spark://nohost:7077", {}, 1.0), lambda text: None)
    assert not report.ok
    (found,) = report.findings
    assert found.level is Level.FAILURE
    assert "spark://nohost:7077" in found.remedy


SILENT, HEARD = UdpLink(False, False, False), UdpLink(True, True, True)


@pytest.mark.parametrize(
    ("master", "conf", "driver"),
    [
        ("spark://h:7077", {}, False),
        ("spark://h:7077", {"spark.sparkstrom.controller": "driver"}, True),
        ("spark://h:7077", {"spark.sparkstrom.workers_per_node": "2"}, True),  # no slot is left
        ("local-cluster[2,2,1024]", {}, True),
    ],
)
def test_unreachable_driver_matters_only_if_controller_stays(
    master: str, conf: dict[str, str], driver: bool
) -> None:
    """With ``controller="auto"`` it moves to an executor, if one has a task slot for it."""
    session: Any = SimpleNamespace(conf=conf, context=SimpleNamespace(master=master))
    names = ("driver", "a", "b")
    report = Report(
        matrix={
            sender: {to: SILENT if sender == "driver" else HEARD for to in names if to != sender}
            for sender in names
        }
    )
    made = _Examination(session, ExaminationOptions(None, {}, 1.0), report, lambda text: None)
    made._slots, made._workers = TaskSlots(2, 2), 3
    assert made._find_udp_needs().driver is driver


@pytest.mark.parametrize("lacks", [False, True])
def test_driver_is_excused_only_without_aeron_library(
    monkeypatch: pytest.MonkeyPatch, lacks: bool
) -> None:
    """A media driver that does not start is no reason for a fit to move its controller."""

    def check(*_: object) -> None:
        if lacks:
            raise SetupError("there is no Aeron library on this machine")

    monkeypatch.setattr(examining, "check_driver_machine", check)
    monkeypatch.setattr(examining, "driver_host", lambda context: "127.0.0.1")
    session: Any = SimpleNamespace(conf={}, context=SimpleNamespace(master="spark://h:7077"))
    made = _Examination(session, ExaminationOptions(None, {}, 1.0), Report(), lambda text: None)
    made._slots, made._workers = TaskSlots(2, 2), 3
    assert made._may_controller_leave
    assert made._is_driver_excused is lacks


def test_compiled_kernels_are_found_in_directory_of_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Compiled kernels are found in the directory of the environment variable."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert find_kernel_cache() == (tmp_path, False)
    (tmp_path / "sparkstrom.encoding.gaps-0123.kernels").touch()
    assert find_kernel_cache() == (tmp_path, True)


def test_kernel_cache_without_usable_directory_is_var_tmp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before, the doctor tested the scratch directory, where a fit stores no kernels."""

    def refuse(environ: object) -> Path:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(host_facts, "kernel_directory", refuse)
    monkeypatch.delenv(VARIABLE, raising=False)
    assert find_kernel_cache() == (Path("/var/tmp"), False)
