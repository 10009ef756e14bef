"""Tests of programs that are run again with their checkpoints, as if they had not ended."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkstrom import EarlyStopping, ParallelWrapper, SetupError, TrainingError
from sparkstrom.fit.checkpoints import CheckpointListener
from sparkstrom.listeners import TrainingListener
from sparkstrom.local import rounds as local_rounds
from sparkstrom.models import Adam, DenseNetwork
from tests.unit.rounds.in_process_fits import InProcessWorkers

CHANCE = np.random.default_rng(0)
X = CHANCE.normal(size=(120, 6)).astype(np.float32)
Y = CHANCE.integers(0, 2, 120)  # random labels, so the loss of held-out rows gets worse

Program = Callable[..., ParallelWrapper]


class FailingListener:
    """A listener that fails once a checkpoint has at least ``epochs`` epochs."""

    def __init__(self, epochs: int) -> None:
        self._epochs = epochs

    def on_checkpoint(self, event: Any) -> None:
        if event.epochs >= self._epochs:
            raise ZeroDivisionError("a bug of the listener")


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Program]:
    """Return ``start(name)``, which creates a wrapper whose checkpoints are in ``name``."""
    monkeypatch.setattr(local_rounds, "ActiveWorkers", InProcessWorkers)
    made: list[ParallelWrapper] = []

    def start(
        name: str | None, rate: float = 0.05, model: Any = None, **options: Any
    ) -> ParallelWrapper:
        monkeypatch.setattr("sparkstrom.fit.checkpoints._directory_owners", {})
        given = {"training_mode": "AVERAGING", "progress": False, "batch_size_per_worker": 10}
        if name is not None:
            given["checkpoint_directory"] = str(tmp_path / name)
        model = model or DenseNetwork([6, 12, 2], updater=Adam(rate), seed=3)
        made.append(ParallelWrapper(model, 1, **given | options))
        return made[-1]

    yield start
    for each in made:
        each.close()


def test_resumed_fit_equals_uninterrupted_fit(program: Program) -> None:
    """The epochs' numbers, which determine row orders and learning rates, are continued."""
    program("twice").fit((X, Y), 2, run_log="")
    more, once = program("twice"), program("once")
    summary = more.fit((X, Y), 4, run_log="")
    once.fit((X, Y), 4, run_log="")
    assert [each.epoch for each in summary.history] == [1, 2, 3, 4]
    np.testing.assert_array_equal(more.parameters, once.parameters)


def test_fit_after_best_epoch_restore_is_same_in_new_program(
    program: Program,
) -> None:
    """A fit that follows one which restored its best epoch gives the same bits in a new program."""
    rule: dict[str, Any] = {"validation": 0.3, "early_stopping": EarlyStopping(patience=3)}
    found = []
    for name, fits in (("at once", 2), ("later", 1), ("later", 2)):
        network = program(name)
        summary = network.fit((X, Y), 30, **rule, run_log="")
        assert summary.best is not None
        assert summary.best.epoch < len(summary.history)
        if fits == 2:
            network.fit((X, Y), 1, run_log="")
            found.append(network.parameters)
    np.testing.assert_array_equal(*found)


class FitEndAssigningListener(TrainingListener):
    """A listener that assigns parameters when a fit has ended or failed."""

    network: ParallelWrapper

    def on_fit_end(self, event: Any) -> None:
        self.network.parameters = np.full(len(self.network.parameters), 0.5)


@pytest.mark.parametrize("fails", [True, False])
def test_parameters_assigned_by_listener_at_fit_end_are_kept(program: Program, fails: bool) -> None:
    """Parameters that a listener assigns at the end of a fit, failed or not, are kept."""
    listener, network = FitEndAssigningListener(), program("kept", checkpoint_every="1 epochs")
    listener.network = network
    epochs, listeners = (5000, [listener, FailingListener(1)]) if fails else (2, [listener])
    with pytest.raises(TrainingError) if fails else contextlib.nullcontext():
        network.fit((X, Y), epochs, listeners=listeners, run_log="")
    assert set(network.parameters) == {0.5}


class EpochAssigningListener(TrainingListener):
    """A listener that assigns parameters during the fit."""

    network: ParallelWrapper

    def on_epoch(self, event: Any) -> None:
        self.network.parameters = self.network.parameters


def test_assigning_parameters_during_any_fit_is_refused(program: Program) -> None:
    """Assigning parameters during a fit is refused, in the first fit and in a later one."""
    listener, network = EpochAssigningListener(), program(None)
    listener.network = network
    for _ in range(2):
        with pytest.raises(
            TrainingError, match="a fit or rehearsal of this ParallelWrapper is under"
        ):
            network.fit((X, Y), 60, listeners=[listener], run_log="")


@pytest.mark.parametrize("fails", [True, False])
def test_fit_starts_from_parameters_assigned_after_restore(
    program: Program, tmp_path: Path, fails: bool
) -> None:
    """A fit starts from assigned parameters, also if the restored checkpoint was incomplete."""
    saved, restored = program("saved", checkpoint_every="1 epochs"), program(None, rate=1e-9)
    if fails:
        with pytest.raises(TrainingError, match="a bug of the listener"):
            saved.fit((X, Y), 5000, listeners=[FailingListener(1)], run_log="")
    else:
        saved.fit((X, Y), 1, run_log="")
    restored.restore(tmp_path / "saved")
    restored.parameters = np.zeros(restored.parameters.shape)
    restored.fit((X, Y), 1, run_log="")
    assert np.abs(restored.parameters).max() < 1e-6


def test_retry_starts_from_parameters_assigned_after_failed_fit(
    program: Program,
) -> None:
    """A retry starts from assigned parameters, and not from the failed fit's checkpoint."""
    network = program("failed", rate=1e-9, checkpoint_every="1 epochs")
    with pytest.raises(TrainingError, match="a bug of the listener"):
        network.fit((X, Y), 5000, listeners=[FailingListener(1)], run_log="")
    network.parameters = np.zeros(network.parameters.shape)
    assert network.fit((X, Y), 2, run_log="").resumed_from is None
    assert np.abs(network.parameters).max() < 1e-6


def test_interrupted_fit_can_be_resumed_in_same_program(
    program: Program, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A message tells how; without that, the next fit is another one."""

    def interrupt(listener: Any, epoch: Any) -> None:
        raise KeyboardInterrupt

    network = program("interrupted", progress="plain")
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointListener, "on_epoch", interrupt)
        with pytest.raises(KeyboardInterrupt):
            network.fit((X, Y), 5000, run_log="")
    found = re.search(r"call network\.restore\('(.+)'\) before fit", capsys.readouterr().err)
    assert found is not None
    network.restore(found[1])
    assert network.fit((X, Y), 1, run_log="").resumed_from == found[1]


def test_fit_without_epochs_left_reports_checkpoint_epochs(
    program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    """The summary has the checkpoint's epochs, even if fewer epochs are asked for."""
    with pytest.raises(TrainingError, match="a bug of the listener"):
        program("some", checkpoint_every="1 epochs").fit(
            (X, Y), 5000, listeners=[FailingListener(3)], run_log=""
        )
    network = program("some", progress="plain")
    summary = network.fit((X, Y), 2, run_log="")
    assert summary.epochs == summary.epochs_resumed == network._state.epochs >= 3
    assert summary.loss == summary.history[-1].loss
    assert summary.warnings == []
    assert "no minibatch of the 2 epochs asked for is left to train" in capsys.readouterr().err


@pytest.mark.parametrize(("before", "after"), [("loss", "accuracy"), ("accuracy", "loss")])
def test_resume_with_other_metric_ignores_earlier_values(
    program: Program, before: str, after: str
) -> None:
    """With random labels accuracies are below losses: comparing them chooses a wrong best epoch."""

    def rule(metric: str) -> dict[str, Any]:
        stopping = EarlyStopping(metric=metric, patience=5000)
        return {"validation": 0.3, "early_stopping": stopping, "run_log": ""}

    with pytest.raises(TrainingError, match="a bug of the listener"):
        program("some", rate=1e-6, checkpoint_every="1 epochs").fit(
            (X, Y), 5000, listeners=[FailingListener(2)], **rule(before)
        )
    network = program("some", rate=1e-6)
    epochs = network._checkpoints._read_newest(pytest.fail).complete_epochs  # type: ignore
    summary = network.fit((X, Y), epochs + 2, **rule(after))
    assert summary.epochs_resumed == epochs
    values = [each.validation for each in summary.history]
    assert np.isfinite(values).tolist() == [False] * epochs + [True] * 2
    assert summary.best is not None
    assert summary.best.metric == after
    assert summary.best.epoch > epochs
    (warning,) = summary.warnings
    assert f"has the {before} of held-out rows, and this fit measures their {after}" in warning


def test_checkpoints_of_unresumed_fit_are_kept(program: Program, tmp_path: Path) -> None:
    """With resume=False, a fit removes only files that its own network wrote."""
    old = program("kept", checkpoint_every="1 epochs").fit((X, Y), 4, run_log="").checkpoint
    earlier = set((tmp_path / "kept").iterdir())
    network = program("kept", resume=False, checkpoint_every="1 epochs", keep_last=2)
    for _ in range(2):
        assert network.fit((X, Y), 5, run_log="").resumed_from is None
    left = set((tmp_path / "kept").iterdir())
    assert Path(old) in earlier <= left
    assert len(left - earlier) == 2


def test_early_stopping_added_on_resume_picks_epoch_after_resume(
    program: Program,
) -> None:
    """Without a copy of the best epoch's parameters, no epoch before the resume is the best."""
    with pytest.raises(TrainingError, match="a bug of the listener"):
        program("late", rate=0.1, checkpoint_every="1 epochs").fit(
            (X, Y), 5000, validation=0.3, listeners=[FailingListener(12)], run_log=""
        )
    network = program("late", rate=0.1)
    rule = EarlyStopping(patience=3)
    summary = network.fit((X, Y), 5000, validation=0.3, early_stopping=rule, run_log="")
    losses = [each.validation for each in summary.history]
    assert np.argmin(losses) < summary.epochs_resumed  # what the rule would have chosen
    assert summary.best is not None
    assert summary.best.epoch > summary.epochs_resumed
    assert len(losses) >= summary.epochs_resumed + 4
    assert "has no parameters of the best epoch so far" in "".join(summary.warnings)


def test_rerun_program_with_restore_resumes_its_own_checkpoint(
    program: Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a crash, the fit's own checkpoint is used instead of the restored one."""
    program("before").fit((X, Y), 1, run_log="")

    def fine_tune(epochs: int, *listeners: Any) -> Any:
        network = program("own", checkpoint_every="1 epochs", progress="plain")
        network.restore(tmp_path / "before")
        return network, network.fit((X, Y), epochs, listeners=listeners, run_log="")

    with pytest.raises(TrainingError, match="a bug of the listener"):
        fine_tune(5000, FailingListener(3))
    network, summary = fine_tune(5)
    assert summary.resumed_from.startswith(str(tmp_path / "own"))
    assert summary.epochs_resumed >= 3
    assert "was written after an earlier restore(" in capsys.readouterr().err
    # After the program's first fit, restore is a decision of the user.
    network.restore(tmp_path / "before")
    assert network.fit((X, Y), 2, run_log="").resumed_from is None


@pytest.mark.parametrize("other_model", [False, True])
def test_unrelated_checkpoints_do_not_replace_restored_one(
    program: Program, tmp_path: Path, other_model: bool
) -> None:
    """A program may restore into a directory with checkpoints of an unrelated training."""
    program("before").fit((X, Y), 1, run_log="")
    unrelated = DenseNetwork([6, 5, 2]) if other_model else None
    network = program("own", model=unrelated)
    for _ in range(3):
        network.fit((X, Y), 1, run_log="")
    again = program("own")
    again.restore(tmp_path / "before")
    expected = again.parameters
    assert again.fit((X, Y), 1, run_log="").resumed_from is None
    assert 0 < np.abs(again.parameters - expected).max() < 0.5  # a fit that started from them


@pytest.mark.parametrize("restores", [False, True])
def test_unwritable_checkpoint_directory_is_refused_before_training(
    program: Program, tmp_path: Path, restores: bool
) -> None:
    """That holds also for a fit that starts with a restored checkpoint."""
    program("before").fit((X, Y), 1, run_log="")
    (tmp_path / "file").touch()
    network = program("file")
    if restores:
        network.restore(tmp_path / "before")
    with pytest.raises(SetupError, match="cannot be written"):
        network.fit((X, Y), 1, run_log="")


def test_relative_checkpoint_directory_survives_chdir(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All fits of a network write to one directory, although the program changes its own."""
    monkeypatch.chdir(tmp_path)
    network = program(None, checkpoint_directory="relative")
    network.fit((X, Y), 1, run_log="")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert Path(network.fit((X, Y), 1, run_log="").checkpoint).parent == tmp_path / "relative"
