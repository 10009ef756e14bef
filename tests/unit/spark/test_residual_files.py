"""Tests of residual files: a worker's residual, tau and optimizer state for the next fit."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from sparkstrom.encoding.encoder import Encoder
from sparkstrom.encoding.thresholds import AdaptiveThreshold
from sparkstrom.models import DenseNetwork
from sparkstrom.models.base import Batch, State
from sparkstrom.models.updaters import UPDATERS
from sparkstrom.runtime.theta import Replica, Theta
from sparkstrom.worker import training_task as residual_files

BATCH = Batch(np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32), np.arange(8) % 3)

WAYS = pytest.mark.parametrize("train_on", ["local", "replica"])


def make_replica(
    train_on: str, updater: str = "adam", kind: type[DenseNetwork] = DenseNetwork
) -> Replica:
    model = kind([4, 5, 3], updater=UPDATERS[updater]())
    theta = Theta(model.n_params, 20)
    encoder = Encoder(model.n_params, 20, AdaptiveThreshold(1e-2), train_on=train_on)
    return Replica(model, theta, encoder, local=train_on == "local")


def make_trained_replica(train_on: str, updater: str = "adam") -> Replica:
    """Return a replica after three steps, each with a publication."""
    replica = make_replica(train_on, updater)
    for _ in range(3):
        replica.step(BATCH)
        replica.publish()
    return replica


@WAYS
@pytest.mark.parametrize("updater", list(UPDATERS))
def test_residual_file_restores_residual_tau_and_optimizer(
    tmp_path: Path, train_on: str, updater: str
) -> None:
    """Residual, tau and optimizer state are restored exactly, and the file is deleted."""
    before = make_trained_replica(train_on, updater)
    note = residual_files.save_residual(before, tmp_path, "n1")
    assert note.mass == pytest.approx(np.abs(before.residual()).sum(dtype=np.float64))
    assert note.mass > 0
    after = make_replica(train_on, updater)
    residual_files.restore_residual(after, note.path)
    np.testing.assert_array_equal(after.residual(), before.residual())
    assert after.encoder.tau == before.encoder.tau
    state, expected = after.model.updater_state(), before.model.updater_state()
    assert set(state) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(state[name], value)
    assert list(tmp_path.iterdir()) == []  # a file is restored only once


@WAYS
def test_restored_residual_is_added_to_existing_residual(tmp_path: Path, train_on: str) -> None:
    """A restored residual is added to the one that the worker has already."""
    note = residual_files.save_residual(make_trained_replica(train_on), tmp_path, "n1")
    after = make_trained_replica(train_on)
    before = after.residual()
    residual_files.restore_residual(after, note.path)
    np.testing.assert_allclose(after.residual(), 2 * before, rtol=1e-5, atol=1e-7)


def test_delete_residuals_deletes_files_of_one_network(tmp_path: Path) -> None:
    """delete_residuals deletes the files of one network and returns their number."""
    replica = make_trained_replica("local")
    for network in ("n1", "n1", "n2"):
        residual_files.save_residual(replica, tmp_path, network)
    assert residual_files.delete_residuals(tmp_path, "n1") == 2
    assert residual_files.delete_residuals(tmp_path, "n1") == 0
    assert len(list(tmp_path.iterdir())) == 1


def test_failed_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails leaves no file."""

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="No space"):
        residual_files.save_residual(make_trained_replica("local"), tmp_path, "n1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("keeps", [False, True])
def test_full_disk_at_fit_end_does_not_fail_fit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    keeps: bool,
) -> None:
    """A full disk does not fail the fit; it is logged if residuals were to be kept."""

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    session = make_session(tmp_path, keeps=keeps)
    save = residual_files.TrainingSession._save_residual
    assert save(session, make_trained_replica("local")) is None
    assert list(tmp_path.iterdir()) == []
    told = [f"{tmp_path} ([Errno 28] No space left on device)" in line for line in caplog.messages]
    assert told == [True] * keeps
    assert session.warnings == [f"partition 3 on h: {line}" for line in caplog.messages]


def make_session(folder: Path, *, keeps: bool = True) -> Any:
    """Return the parts of a TrainingSession that save and add residuals in this folder."""
    session = SimpleNamespace(
        _job=SimpleNamespace(keep_residuals=keeps, network="n1"),
        _environment=SimpleNamespace(scratch=folder, partition=3, host="h"),
        warnings=[],
    )
    session._warn = partial(residual_files.TrainingSession._warn, cast(Any, session))
    return session


def damage_last_array(path: Path) -> None:
    """Change one byte of the last array, which is read after the residual."""
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x01\x02") - 1] ^= 1  # before the zip directory
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage", [Path.unlink, lambda path: os.truncate(path, 100), damage_last_array]
)
def test_unreadable_residual_file_leaves_residual_zero(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    """If a file is missing or damaged, the worker starts with residual 0 and warns of it."""
    note = residual_files.save_residual(make_trained_replica("local"), tmp_path, "n1")
    damage(Path(note.path))
    after, session = make_replica("local"), make_session(tmp_path)
    residual_files.TrainingSession._add_saved_residuals(session, after, (note.path,))
    assert not after.residual().any()
    assert [note.path in line for line in caplog.messages] == [True]
    assert session.warnings == [f"partition 3 on h: {line}" for line in caplog.messages]


class ResidualStateModel(DenseNetwork):
    """A custom model whose optimizer state has an array named residual, as our files have."""

    def updater_state(self) -> State:
        return {**super().updater_state(), "residual": np.ones(3, np.float32)}

    def load_updater_state(self, state: State) -> None:
        self.remembered = state["residual"]
        super().load_updater_state({k: v for k, v in state.items() if k != "residual"})


@WAYS
def test_optimizer_array_named_residual_is_restored(tmp_path: Path, train_on: str) -> None:
    """An optimizer's array named residual is restored, and not mixed up with the residual."""
    before, after = (make_replica(train_on, kind=ResidualStateModel) for _ in range(2))
    residual_files.restore_residual(
        after, residual_files.save_residual(before, tmp_path, "n1").path
    )
    assert isinstance(after.model, ResidualStateModel)
    np.testing.assert_array_equal(after.model.remembered, np.ones(3))


class CountedStateModel(DenseNetwork):
    """A custom model whose optimizer state has a NumPy number, or later another object."""

    counted: Any = np.int64(2)

    def updater_state(self) -> State:
        return {**super().updater_state(), "counted": self.counted}

    def load_updater_state(self, state: State) -> None:
        self.counted = state["counted"]
        super().load_updater_state({k: v for k, v in state.items() if k != "counted"})


def test_numpy_number_in_optimizer_state_is_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A NumPy number in a state is saved; with a set, a message is logged and no file written."""
    session = make_session(tmp_path)
    before, after = (make_replica("local", kind=CountedStateModel) for _ in range(2))
    save = residual_files.TrainingSession._save_residual
    saved = save(session, before)
    assert saved is not None
    residual_files.restore_residual(after, saved.path)
    assert cast(CountedStateModel, after.model).counted == 2
    cast(CountedStateModel, before.model).counted = {2}
    assert save(session, before) is None
    assert "contains 'counted', a set" in caplog.text
