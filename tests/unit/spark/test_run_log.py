"""Tests of run logs: which file a fit writes, if any, and which old files are removed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkstrom import ParallelWrapper, UsageError
from sparkstrom.data.column_selection import ColumnSpec
from sparkstrom.fit import listeners as run_log
from sparkstrom.fit.listeners import SnapshotEvaluator, open_run_log
from sparkstrom.fit.trained_network import check_fit_arguments
from sparkstrom.models import DenseNetwork, Sgd
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.runtime.master_control import Snapshot

SPEC = FitSpec(workers=2, epochs=3, n_params=4, version="1", job=0xABC)


@pytest.fixture(autouse=True)
def empty_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test in an empty directory, without SPARKSTROM_RUNS."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SPARKSTROM_RUNS")


def test_default_run_log_is_in_working_directory() -> None:
    log = open_run_log(None, SPEC)
    assert log is not None
    assert log.path.parent == Path("sparkstrom-runs")
    assert log.path.name.endswith("-0000000000000abc.jsonl")
    assert not log.path.parent.exists()  # not before there is something to write


@pytest.mark.parametrize("wrong", [5, True, b"runs.jsonl", ["runs.jsonl"]])
def test_rejects_run_log_that_is_no_path(wrong: Any) -> None:
    with pytest.raises(UsageError, match=r"run_log=.*: give the path of a file"):
        check_fit_arguments(DenseNetwork([2, 2]), 1, ColumnSpec(), None, (), wrong)
    for right in (None, "", "runs.jsonl", Path("runs.jsonl")):
        check_fit_arguments(DenseNetwork([2, 2]), 1, ColumnSpec(), None, (), right)


def test_rejects_directory_as_run_log(tmp_path: Path) -> None:
    """Before, the fit ran without a log, and the fit only warned."""
    for wrong in (tmp_path, f"{tmp_path}/", "."):
        with pytest.raises(UsageError, match=r"run_log=.*: is a directory; name a file in it"):
            check_fit_arguments(DenseNetwork([2, 2]), 1, ColumnSpec(), None, (), wrong)


@pytest.mark.parametrize(
    "wrong", ["s3://bucket/runs.jsonl", "hdfs:/runs.jsonl", Path("s3://bucket/runs.jsonl")]
)
def test_rejects_url_as_run_log(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that grows is a local file; a URL would name a folder such as "s3:"."""
    with pytest.raises(UsageError, match=r"run log .*(s3|hdfs):/.*name a file on this machine"):
        check_fit_arguments(DenseNetwork([2, 2]), 1, ColumnSpec(), None, (), wrong)
    monkeypatch.setenv("SPARKSTROM_RUNS", "s3://bucket/runs")
    with pytest.raises(UsageError, match=r"SPARKSTROM_RUNS='s3://bucket/runs': .* of this machine"):
        check_fit_arguments(DenseNetwork([2, 2]), 1, ColumnSpec(), None, (), None)


def test_tilde_in_run_log_path_is_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SPARKSTROM_RUNS", "~/runs")
    named, unnamed = open_run_log("~/a.jsonl", SPEC), open_run_log(None, SPEC)
    assert named is not None
    assert unnamed is not None
    assert named.path == tmp_path / "home" / "a.jsonl"
    assert unnamed.path.parent == tmp_path / "home" / "runs"
    local = open_run_log(f"file://{tmp_path}/b.jsonl", SPEC)
    assert local is not None
    assert local.path == tmp_path / "b.jsonl"


def test_wrong_run_log_is_refused_before_reading_rows() -> None:
    """A wrong ``run_log`` is refused before a row is read."""
    drawn = iter([(np.ones(2, np.float32), 1)])
    with (
        ParallelWrapper(DenseNetwork([2, 2]), 1, progress=False) as wrapper,
        pytest.raises(UsageError, match="run_log=5: give the path of a file"),
    ):
        wrapper.fit(drawn, run_log=5)  # type: ignore[arg-type]
    assert next(drawn)[1] == 1


@pytest.mark.parametrize(("value", "parent"), [("elsewhere/runs", "elsewhere/runs"), ("", None)])
def test_environment_sets_run_log_directory_or_disables_log(
    monkeypatch: pytest.MonkeyPatch, value: str, parent: str | None
) -> None:
    """SPARKSTROM_RUNS names another directory; if it is empty, no log is written."""
    monkeypatch.setenv("SPARKSTROM_RUNS", value)
    log = open_run_log(None, SPEC)
    assert (log and log.path.parent) == (parent and Path(parent))


def test_run_log_argument_overrides_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file given as ``run_log`` is used whatever the environment; an empty name means no log."""
    monkeypatch.setenv("SPARKSTROM_RUNS", "")
    log = open_run_log("mine.jsonl", SPEC)
    assert log is not None
    assert log.path == Path("mine.jsonl")
    assert open_run_log("", SPEC) is None


def test_snapshot_evaluation_leaves_model_of_fit_unchanged() -> None:
    """SnapshotEvaluator evaluates a snapshot without changing the model of the fit."""
    model = DenseNetwork([2, 2], updater=Sgd(0.1), seed=1)
    mine = model.initial()
    model.bind(mine)
    others = np.array([9, -9, -9, 9, 0, 0], np.float32)  # class 0 where the first feature is larger
    judge = SnapshotEvaluator(model, lambda: Snapshot(7, others.copy(), b"", ()))
    features = np.array([[1, 0], [0, 1]], np.float32)
    found = judge(features, np.array([0, 1]), "classification")
    assert found.classification is not None
    assert found.classification.accuracy == 1.0
    np.testing.assert_array_equal(model.predict(features), _fresh(mine).predict(features))


def test_snapshot_evaluator_takes_lists_and_rejects_bad_rows() -> None:
    """SnapshotEvaluator takes lists and doubles; it refuses rows that ``evaluate`` refuses."""
    model = DenseNetwork([2, 2], seed=1)
    judge = SnapshotEvaluator(model, lambda: Snapshot(7, model.initial(), b"", ()))
    rows = [[1, 0], [0, 1], [1, 1]]
    found = judge(rows, [0.0, 1.0, 1.0], ("classification", "loss"))
    again = judge(np.array(rows, np.float32), np.array([0, 1, 1]), ("classification", "loss"))
    assert (found.table(), found.loss) == (again.table(), again.loss)
    for features, labels, why in (
        (rows, [0, 1], "have .3, 2. rows"),
        (np.zeros((0, 2)), np.zeros(0, int), "no rows to evaluate"),
        (np.ma.masked_equal(rows, 0), [0, 1, 1], "masked"),
    ):
        with pytest.raises(UsageError, match=why):
            judge(features, labels, None)


def _fresh(parameters: np.ndarray) -> DenseNetwork:
    model = DenseNetwork([2, 2], updater=Sgd(0.1), seed=1)
    model.bind(parameters)
    return model


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_only_oldest_automatic_logs_are_removed(tmp_path: Path) -> None:
    """The oldest automatically named logs are removed; files with other names stay."""
    logs = [f"20260101-00000{i}-00000000deadbee{i}.jsonl" for i in range(5)]
    for name in [*logs, "mine.jsonl", "20260101-notes.txt"]:
        (tmp_path / name).touch()
    run_log.remove_old_logs(tmp_path, 2)
    assert names_in(tmp_path) == sorted([*logs[3:], "mine.jsonl", "20260101-notes.txt"])
    run_log.remove_old_logs(tmp_path / "missing", 2)


def test_tuning_fits_write_no_run_log() -> None:
    """A fit called by a function singleTask of pyspark.ml.tuning has no automatic run log."""
    source = "def singleTask(open_log):\n    return open_log()\n"
    for module, has_log in (("pyspark.ml.tuning", False), ("my.tuning", True)):
        names: dict[str, Any] = {"__name__": module}
        exec(source, names)
        assert (names["singleTask"](lambda: open_run_log(None, SPEC)) is not None) is has_log


def test_installed_pyspark_has_function_of_tuning_fits() -> None:
    """The installed pyspark has the function by which tuning fits are recognized."""
    tuning = importlib.util.find_spec("pyspark.ml.tuning")
    assert tuning is not None
    assert tuning.origin is not None
    assert "def singleTask" in Path(tuning.origin).read_text()
