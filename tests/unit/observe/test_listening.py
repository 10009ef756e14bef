"""Tests of the package's listeners: what they print, record and write to files."""

from __future__ import annotations

import json
import math
import os
import pty
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from sparkstrom.base.errors import SetupError, UsageError
from sparkstrom.listeners import (
    CollectScoresListener,
    EpochEnd,
    EvaluativeListener,
    FitBegin,
    FitEnd,
    Iteration,
    JsonLines,
    MlflowListener,
    PerformanceListener,
    ScoreIterationListener,
    TensorBoardListener,
    TimeIterationListener,
    TrainingListener,
    WorkerChange,
)
from sparkstrom.observe import standard_listeners as tracking
from sparkstrom.observe.listener_events import read_run_log, to_json_value
from sparkstrom.observe.standard_listeners import WorkerChangeReporter

BEGIN = FitBegin("DenseNetwork", 4, 2, 3, 0, {"threshold": "auto", "batch_size_per_worker": 8})
FIRST = Iteration(
    minibatches=10, minibatches_expected=100, epoch=0.1, loss=None, examples=80, seconds=2.0,
    updates=4, bytes_sent=1_000_000, sent_fraction=1e-3, tau=0.5, staleness=1.0, waiting=2.0,
    workers=2, workers_wanted=2,
)  # fmt: skip


def make_iteration(minibatches: int, **changes: Any) -> Iteration:
    """Return an event after these minibatches of a fit with 0.1 s and 8 examples per minibatch."""
    seconds, examples = 1.0 + minibatches / 10, 8 * minibatches
    known = {"loss": 1 / minibatches, "seconds": seconds, "examples": examples} | changes
    return replace(FIRST, minibatches=minibatches, **known)


def epoch(number: int, validation: float | None = None) -> EpochEnd:
    return EpochEnd(number, 0.5, validation, 80, 1.0, lambda: None, lambda *rows: None)


def pass_iterations(listener: Any, *iterations: Iteration) -> None:
    """Begin a fit with the listener and pass it these iterations."""
    listener.on_fit_begin(BEGIN)
    for iteration in iterations:
        listener.on_iteration(iteration)


def test_score_is_printed_every_frequency_minibatches() -> None:
    """The score is printed at the first event at or after each multiple of the frequency."""
    said: list[str] = []
    pass_iterations(
        ScoreIterationListener(20, said.append),
        FIRST,
        *map(make_iteration, (19, 20, 21, 45, 59, 60)),
    )
    assert said == [
        "loss at minibatch 20 is 0.05",
        "loss at minibatch 45 is 0.0222222",
        "loss at minibatch 60 is 0.0166667",
    ]


def test_listener_counts_from_0_in_second_fit() -> None:
    """At the start of a second fit, minibatches are counted from 0 again."""
    scores = CollectScoresListener(20)
    for _ in range(2):
        pass_iterations(scores, make_iteration(20), make_iteration(21))
    assert scores.scores == [(20, 0.05), (20, 0.05)]


def test_printed_speed_is_since_previous_line() -> None:
    """The printed speed is that since the listener's previous line, or since the first event."""
    said: list[str] = []
    pass_iterations(
        PerformanceListener(10, said.append),
        make_iteration(5),
        make_iteration(10),
        make_iteration(30, examples=480),
    )
    assert said == [
        "minibatch 10: 80 examples/s, 10.0 minibatches/s, 1.00 MB sent, 2 of 2 workers",
        "minibatch 30: 200 examples/s, 10.0 minibatches/s, 1.00 MB sent, 2 of 2 workers",
    ]


def test_printed_speed_excludes_start_and_resumed_minibatches() -> None:
    """Before, the first line of a resumed fit had all minibatches of the checkpoint."""
    said: list[str] = []
    resumed = [
        make_iteration(n, seconds=27.0 + n / 10, examples=8 * (n - 5000))
        for n in (5003, 5009, 5013)
    ]
    pass_iterations(PerformanceListener(10, said.append), *resumed)
    assert said == [
        "minibatch 5,013: 80 examples/s, 10.0 minibatches/s, 1.00 MB sent, 2 of 2 workers"
    ]


def test_printed_speed_restarts_after_controller_loss() -> None:
    """Before, fewer examples than in the last line gave a negative speed."""
    said: list[str] = []
    after = [make_iteration(n, examples=8 * (n - 20)) for n in (31, 40, 50)]
    pass_iterations(
        PerformanceListener(10, said.append), make_iteration(20), make_iteration(30), *after
    )
    assert [text.split(",")[0] for text in said] == [
        "minibatch 30: 80 examples/s", "minibatch 40: 80 examples/s", "minibatch 50: 80 examples/s",
    ]  # fmt: skip
    assert "examples_per_second" not in dict(
        tracking.iteration_scalars(after[0], make_iteration(30))
    )


def test_speed_and_remaining_time_exclude_controller_recovery() -> None:
    """The time until workers train again does not count, whenever the next line is due."""
    said: list[str] = []
    lost = [
        make_iteration(n, seconds=60 + n / 10, examples=8 * (n - 800)) for n in (815, 1000, 1100)
    ]
    pass_iterations(PerformanceListener(1000, said.append), FIRST, make_iteration(900), *lost)
    assert [text.split(",")[1] for text in said] == ["000: 80 examples/s"]
    said.clear()
    ends = [
        replace(event, minibatches_expected=2000) for event in (FIRST, make_iteration(900), *lost)
    ]
    pass_iterations(TimeIterationListener(1000, said.append), *ends)
    assert said == ["remaining: 1 min 40 s"]


def test_remaining_time_excludes_start() -> None:
    """The remaining time is estimated without the minibatches before the first event."""
    said: list[str] = []
    pass_iterations(
        TimeIterationListener(10, said.append),
        replace(FIRST, seconds=0.0),
        make_iteration(10),
        make_iteration(40),
    )
    assert said == ["remaining: 0 min 10 s"]


@pytest.mark.parametrize(
    ("left_s", "words"),
    [(29.6, "0 min 30 s"), (59.7, "1 min 0 s"), (100.0, "1 min 40 s"), (7199.0, "119 min 59 s")],
)
def test_remaining_time_is_minutes_and_remaining_seconds(left_s: float, words: str) -> None:
    """Before, the minutes were rounded: 100 seconds were "2 min 40 s"."""
    said: list[str] = []
    first, now = make_iteration(10, seconds=0.0), make_iteration(20, seconds=left_s / 8)
    pass_iterations(TimeIterationListener(10, said.append), first, now)
    assert said == [f"remaining: {words}"]


def test_rows_are_evaluated_every_frequency_epochs() -> None:
    """Rows are evaluated every ``frequency`` epochs, with the arguments given to the listener."""
    asked: list[Any] = []

    class Found:
        def table(self) -> str:
            return "accuracy 0.5"

    def judge(*rows: Any) -> Found:
        asked.append(rows)
        return Found()

    said: list[str] = []
    listener = EvaluativeListener("x", "y", frequency=2, metrics="roc", say=said.append)
    listener.on_fit_begin(BEGIN)
    for number in (11, 12, 13, 14):
        listener.on_epoch(replace(epoch(number), evaluator=judge))
    assert [number for number, _ in listener.results] == [12, 14]
    assert asked == [("x", "y", "roc")] * 2
    assert said[0] == "epoch 12:\naccuracy 0.5"


@pytest.mark.parametrize(
    "kind", [ScoreIterationListener, PerformanceListener, TimeIterationListener]
)
@pytest.mark.parametrize("frequency", [0, -1, 2.5, "10"])
def test_rejects_frequency_that_is_no_positive_integer(kind: Any, frequency: Any) -> None:
    with pytest.raises(UsageError, match="must be a whole number of at least 1"):
        kind(frequency)


def test_worker_loss_and_replacement_are_printed() -> None:
    """The loss of a worker is printed at once, and its replacement when it has joined."""
    said: list[str] = []
    log = WorkerChangeReporter(said.append)
    both = frozenset({0, 1})
    log.on_worker_change(WorkerChange(both, frozenset(), both, 0.1))
    log.on_worker_change(
        WorkerChange(frozenset(), frozenset({1}), frozenset({0}), 1.0, ("partition 1 on h: gone",))
    )
    log.on_worker_change(WorkerChange(frozenset({1}), frozenset(), both, 2.0))
    assert said == [
        "sparkstrom lost a worker: partition 1 on h: gone",
        "sparkstrom continues: partition 1 has a new worker",
    ]
    at_once = frozenset({0})
    log.on_worker_change(WorkerChange(at_once, at_once, both, 3.0, ("partition 0 on h: taken",)))
    assert said[2:] == [
        "sparkstrom lost a worker: partition 0 on h: taken",
        "sparkstrom continues: partition 0 has a new worker",
    ]


# -- JSON lines ----------------------------------------------------------------------------------


def test_each_event_is_one_valid_json_line(tmp_path: Path) -> None:
    """Each event is one line of JSON; NaN is written as null and functions are left out."""
    lines = JsonLines(tmp_path / "new" / "run.jsonl")
    pass_iterations(lines, FIRST)
    lines.on_worker_change(WorkerChange(frozenset({1, 0}), frozenset(), frozenset({1, 0}), 0.5))
    lines.on_epoch(epoch(1, math.nan))
    lines.on_fit_end(FitEnd(None, "it failed", 3.0))
    found = read_run_log(tmp_path / "new" / "run.jsonl")
    assert [line["event"] for line in found] == [
        "fit_begin", "iteration", "worker_change", "epoch", "fit_end",
    ]  # fmt: skip
    assert (found[0]["format"], found[0]["options"]["threshold"]) == (1, "auto")
    assert found[1]["tau"] == 0.5
    assert found[2]["joined"] == [0, 1]
    assert found[3]["validation"] is None
    assert "copy" not in found[3]
    assert found[4]["error"] == "it failed"
    assert all(line["time"].endswith("+00:00") for line in found)


def test_run_log_is_readable_during_fit_and_skips_torn_line(tmp_path: Path) -> None:
    """Lines can be read during the fit; a torn last line is skipped."""
    path = tmp_path / "run.jsonl"
    lines = JsonLines(path)
    pass_iterations(lines, FIRST)
    assert [line["event"] for line in read_run_log(path)] == ["fit_begin", "iteration"]
    with path.open("a") as file:
        file.write('{"event": "epo')
    assert len(read_run_log(path)) == 2
    lines.on_fit_end(FitEnd(None, None, 1.0))


def test_fit_appended_to_torn_log_begins_on_new_line(tmp_path: Path) -> None:
    """A fit that is appended to a file with a torn last line begins on a new line."""
    lines = JsonLines(tmp_path / "run.jsonl")
    lines.path.write_text('{"event": "epo')
    for _ in range(2):
        lines.on_fit_begin(BEGIN)
        lines.on_fit_end(FitEnd(None, None, 1.0))
    assert [line["event"] for line in read_run_log(lines.path)] == ["fit_begin", "fit_end"] * 2
    assert lines.path.read_text().count("\n") == 5


def test_iteration_lines_are_at_least_half_second_apart(tmp_path: Path) -> None:
    """Lines of iterations are at least half a second apart."""
    lines = JsonLines(tmp_path / "run.jsonl")
    pass_iterations(lines, *(make_iteration(n, seconds=n / 100) for n in range(1, 201)))
    lines.on_fit_end(FitEnd(None, None, 2.0))
    told = [line for line in read_run_log(lines.path) if line["event"] == "iteration"]
    seconds = [line["seconds"] for line in told]
    assert 3 <= len(told) <= 5
    assert min(after - before for before, after in pairwise(seconds)) >= 0.5


def test_values_without_json_form_are_converted() -> None:
    """Values without a JSON form become null, strings, lists or dictionaries."""
    odd = {"a": math.inf, 1: (1, {2}), "p": Path("/x"), "b": True, "o": print}
    found = to_json_value(odd)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert (found["a"], found["1"], found["p"], found["b"]) == (None, [1, [2]], "/x", True)


# -- other tools ---------------------------------------------------------------------------------


def pass_short_fit(listener: TrainingListener) -> None:
    """Pass the listener a fit of four iterations and one epoch."""
    listener.on_fit_begin(BEGIN)
    for minibatches in (10, 20, 21, 40):
        listener.on_iteration(make_iteration(minibatches))
    listener.on_epoch(epoch(1, 0.25))
    listener.on_fit_end(FitEnd(None, None, 9.0))


def test_tensorboard_reads_written_scalars(tmp_path: Path) -> None:
    """TensorBoard's reader finds the scalars that the listener wrote."""
    reading: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    pass_short_fit(TensorBoardListener(str(tmp_path)))
    found = reading.EventAccumulator(str(tmp_path)).Reload()
    loss = [(point.step, point.value) for point in found.Scalars("train/loss")]
    assert loss == [(10, pytest.approx(0.1)), (20, pytest.approx(0.05)), (40, pytest.approx(0.025))]
    assert [p.value for p in found.Scalars("train/examples_per_second")] == pytest.approx([80, 80])
    assert [(p.step, p.value) for p in found.Scalars("epoch/validation")] == [(1, 0.25)]


def test_curves_of_tensorboard_continue_in_the_next_fit(tmp_path: Path) -> None:
    """Fits that follow one another count minibatches on; a resumed fit counts its earlier ones."""
    reading: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    listener = TensorBoardListener(str(tmp_path))
    fits = [
        (BEGIN, 10, None),
        (replace(BEGIN, first_epoch=5), 20, None),
        (replace(BEGIN, first_epoch=5, resumed_from="ck/3"), 30, None),
        (replace(BEGIN, first_epoch=10), 25, "a worker failed"),
        (replace(BEGIN, first_epoch=10), 35, None),  # starts where the failed one did
        (BEGIN, 15, None),  # of another network
    ]
    for begin, minibatches, error in fits:
        listener.on_fit_begin(begin)
        listener.on_iteration(make_iteration(minibatches))
        listener.on_iteration(make_iteration(40, seconds=1.0))  # too early to be written
        listener.on_fit_end(FitEnd(None, error, 9.0))
    found = reading.EventAccumulator(str(tmp_path)).Reload()
    assert [point.step for point in found.Scalars("train/loss")] == [10, 60, 70, 105, 115, 15]


def test_mlflow_reads_written_parameters_and_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow's client finds the parameters, metrics and status that the listener wrote."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a server needs a database
    mlflow: Any = pytest.importorskip("mlflow")
    listener = MlflowListener(f"file:{tmp_path}/runs", "digits")
    pass_short_fit(listener)
    client = mlflow.MlflowClient(tracking_uri=f"file:{tmp_path}/runs")
    run = client.get_run(listener.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["threshold"] == "auto"
    assert run.data.params["workers"] == "2"
    history = client.get_metric_history(listener.run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == [(10, 0.1), (20, 0.05), (40, 0.025)]


@pytest.mark.parametrize("kind", [lambda: TensorBoardListener("x"), MlflowListener])
def test_tracking_listeners_fail_fit_only_at_begin(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``fails_fit`` is None, so only its first event may end a fit; see test_listener_thread."""
    monkeypatch.setattr(tracking.importlib, "import_module", Mock())
    assert kind().fails_fit is None


@pytest.mark.parametrize("kind", [lambda: TensorBoardListener("x"), MlflowListener])
def test_missing_tracking_library_is_refused_at_construction(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listener whose library is not installed raises ``SetupError`` when it is created."""

    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(tracking.importlib, "import_module", missing)
    with pytest.raises(SetupError, match=r"needs the package .* pip install"):
        kind()


def test_rejects_named_pipe_as_run_log(tmp_path: Path) -> None:
    """A named pipe raises an error at once; opening it the usual way would wait for a reader."""
    os.mkfifo(tmp_path / "log.jsonl")
    with pytest.raises(OSError, match="it is not a regular file"):
        JsonLines(tmp_path / "log.jsonl").on_fit_begin(BEGIN)


def test_run_log_may_be_device_file() -> None:
    """A terminal gets the lines of a run log; /dev/null drops them, and remains a device."""
    ours, theirs = pty.openpty()
    log = JsonLines(os.ttyname(theirs))
    log.on_fit_begin(BEGIN)
    written = os.read(ours, 100_000)
    log.on_fit_end(FitEnd(None, None, 1.0))
    os.close(theirs)
    os.close(ours)
    assert json.loads(written)["event"] == "fit_begin"
    nowhere = JsonLines("/dev/null")
    nowhere.on_fit_begin(BEGIN)
    nowhere.on_fit_end(FitEnd(None, None, 1.0))
    assert Path("/dev/null").is_char_device()
