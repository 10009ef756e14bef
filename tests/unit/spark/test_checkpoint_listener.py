"""Tests of CheckpointListener: when checkpoints are written, and what they contain."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from sparkstrom.base.errors import TrainingError
from sparkstrom.base.identity import Position
from sparkstrom.checkpoint.directory import CheckpointDirectory
from sparkstrom.checkpoint.writer import parse_checkpoint_every
from sparkstrom.codec.messages import Phase
from sparkstrom.codec.optimizer_state_codec import decode_state_untrusted, encode_state
from sparkstrom.fit.checkpoints import (
    CheckpointConfig,
    CheckpointListener,
    FitKey,
    ResumePoint,
    read_resume_point,
)
from sparkstrom.fit.early_stopping_listener import EarlyStoppingListener
from sparkstrom.models import DenseNetwork, Sgd
from sparkstrom.observe.epoch_history import Epoch, EpochHistory
from sparkstrom.observe.listener_events import CheckpointWritten
from sparkstrom.protocol.common.fit_spec import FitSpec, PartitionStart
from sparkstrom.runtime.master_control import Progress, Snapshot
from sparkstrom.runtime.master_thread import MasterThread
from sparkstrom.runtime.optimizer_states import OptimizerStates

MODEL = DenseNetwork([4, 3, 2], updater=Sgd(0.1))
PUBLICATIONS = "encoder/publications"
SPEC = FitSpec(2, 9, MODEL.n_params, "1")


class Master:
    """A fake master whose commit, errors and copies of optimizer states the test sets."""

    def __init__(self) -> None:
        self.commit, self.everybody = 0, False
        self.states: list[Future[tuple[bytes, ...]]] = []
        self.optimizer_copies: tuple[bytes, ...] = ()  # the newest copies received
        self.raises: TrainingError | None = None
        self.failure: TrainingError | None = None

    def snapshot(self, *, updaters: bool = False) -> Snapshot:
        if self.raises is not None:
            raise self.raises
        parameters = np.full(MODEL.n_params, self.commit, np.float32)
        start = PartitionStart(Position(0, self.commit), 64, 1, 100)
        return Snapshot(self.commit, parameters, b"", (start, start))

    def copy_optimizer_states(self, *, everybody: bool) -> Future[tuple[bytes, ...]]:
        self.everybody = everybody
        self.states.append(Future())
        return self.states[-1]


class Bench:
    """A CheckpointListener with a fake master, a real directory and a real writer's thread."""

    def __init__(self, directory: Path, every: str = "2 updates", updaters: str = "one") -> None:
        self.directory = CheckpointDirectory(str(directory), 100)
        self.master, self.told, self.said = Master(), list[CheckpointWritten](), list[str]()
        master = cast(MasterThread, self.master)
        states, due = OptimizerStates(), parse_checkpoint_every(every)
        kept = CheckpointConfig(
            self.directory, due, FitKey(1), MODEL, "'auto'", 20, states, {}, updaters
        )
        self.keeper = CheckpointListener(
            kept,
            master,
            book=EpochHistory(),
            stopping=EarlyStoppingListener(master, None),
            notify=self.told.append,
            say=self.said.append,
        )
        self.keeper.on_fit_begin(SPEC)

    def look(self, commits: int, phase: Phase = Phase.RUNNING) -> None:
        """Report progress after this number of commits."""
        self.master.commit = commits
        self.keeper.on_progress(Progress(phase, 2, 2, 2, commits, 900, commits, 0.0, {}))

    def wait(self) -> None:
        """Wait until all offered checkpoints are written."""
        assert self.keeper._writer._wait_until_idle(time.monotonic() + 60)

    def newest(self) -> ResumePoint:
        found = self.directory.read_newest(pytest.fail)
        assert found is not None
        return read_resume_point(*found, MODEL)


@pytest.fixture
def bench(tmp_path: Path) -> Any:
    return Bench(tmp_path)


def test_checkpoint_is_written_when_due_and_announced_after(bench: Bench) -> None:
    """A checkpoint is written when it is due; the next progress report announces it."""
    bench.look(5, Phase.GATHERING)
    bench.keeper.on_phase(Phase.RUNNING)
    bench.look(1)
    assert bench.master.states == []
    bench.look(2)
    bench.master.states[0].set_result(())
    bench.wait()
    bench.look(3)
    (told,) = bench.told
    assert told.path.endswith("checkpoint-000001.npz")
    found = bench.newest()
    assert found.parameters[0] == 2
    assert found.minibatches == 4
    assert found.epochs_done is None
    assert bench.keeper.finish(bench.master.snapshot(), 9, {}) == []


def test_checkpoint_event_has_epochs_of_saved_snapshot(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event has the epochs of the saved snapshot, not those that end while it is written."""
    starts = (
        PartitionStart(Position(3, 1), 64, 1, 9),
        PartitionStart(Position(2, 8), 64, 1, 9),
        PartitionStart(Position(0, 0), 0, 1, 0),
    )
    snapshot = replace(bench.master.snapshot(), partitions=starts)
    monkeypatch.setattr(bench.master, "snapshot", lambda *, updaters: snapshot)
    bench.keeper.on_phase(Phase.RUNNING)
    bench.look(2)
    for epoch in range(1, 6):
        bench.keeper.on_epoch(Epoch(epoch, 0.5, 64, 0.0, 2))
    bench.master.states[0].set_result(())
    bench.wait()
    bench.look(3)
    (told,) = bench.told
    assert told.epochs == 2.0


def test_missing_epoch_event_does_not_delay_checkpoint(tmp_path: Path) -> None:
    """A checkpoint is due after epoch 2 even if there was no event for epoch 1."""
    bench = Bench(tmp_path, "2 epochs")
    bench.keeper.on_phase(Phase.RUNNING)
    bench.keeper.on_epoch(Epoch(2, 0.5, 64, 0.0, 2))
    bench.look(1)
    (state,) = bench.master.states
    state.set_result(())
    bench.wait()
    assert bench.newest().parameters[0] == 1


def test_due_checkpoints_are_skipped_while_states_are_pending(bench: Bench) -> None:
    """Checkpoints that are due while one waits for optimizer states are skipped."""
    bench.keeper.on_phase(Phase.RUNNING)
    for commits in (2, 4, 6):
        bench.look(commits)
    (state,) = bench.master.states
    state.set_result(())
    bench.wait()
    bench.look(8)
    assert len(bench.master.states) == 2
    bench.master.states[1].set_result(())
    bench.keeper.close_failed()
    assert bench.newest().parameters[0] == 8


def test_failed_snapshot_skips_one_checkpoint_and_warns(bench: Bench) -> None:
    """If a snapshot fails, as while the media driver is replaced, one checkpoint is skipped."""
    bench.keeper.on_phase(Phase.RUNNING)
    bench.master.raises = TrainingError("the master did not copy its parameters within 60 s")
    bench.look(2)
    assert bench.master.states == []
    (warning,) = bench.said
    assert warning.startswith("checkpoint of commit 2 not written to ")
    assert "did not copy its parameters within 60 s" in warning
    bench.master.raises = None
    bench.look(3)
    assert bench.master.states == []
    bench.look(4)
    bench.master.states[0].set_result(())
    bench.wait()
    assert bench.newest().parameters[0] == 4
    assert "written again, after 1 that failed" in bench.said[-1]


def test_snapshot_error_of_failed_fit_is_raised(bench: Bench) -> None:
    """If the fit has failed, the snapshot's error is raised."""
    bench.keeper.on_phase(Phase.RUNNING)
    bench.master.raises = bench.master.failure = TrainingError("the master failed")
    with pytest.raises(TrainingError, match="the master failed"):
        bench.look(2)


def test_last_checkpoint_has_delivered_parameters_and_summaries(bench: Bench) -> None:
    """The last checkpoint has the delivered parameters, the finished epochs and the summaries."""
    bench.keeper.on_phase(Phase.RUNNING)
    bench.keeper.on_phase(Phase.DRAINING)
    bench.master.commit = 90
    best = Snapshot(70, np.full(MODEL.n_params, 7, np.float32), b"", ())
    assert bench.keeper.finish(best, 8, {"1": {"loss": 0.5}}) == []
    found = bench.newest()
    assert (found.parameters[0], found.epochs_done) == (7, 8)
    assert found.summaries == {"1": {"loss": 0.5}}
    assert [start.position for start in found.starts] == [(0, 90), (0, 90)]
    assert bench.keeper.newest == bench.told[-1].path == found.path


def test_interrupted_fit_is_saved_as_unfinished(bench: Bench) -> None:
    """An interrupted fit is saved as unfinished."""
    bench.keeper.on_phase(Phase.RUNNING)
    bench.master.commit = 33
    assert bench.keeper.save_interrupted() == []
    assert (bench.newest().parameters[0], bench.newest().epochs_done) == (33, None)


def test_snapshot_error_at_interruption_becomes_warning(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error while saving becomes a warning, so that it does not hide the interruption."""

    def snapshot(*, updaters: bool = False) -> Snapshot:
        raise TrainingError("the master failed")

    bench.keeper.on_phase(Phase.RUNNING)
    monkeypatch.setattr(bench.master, "snapshot", snapshot)
    [warning] = bench.keeper.save_interrupted()
    assert "is not saved" in warning
    assert "the master failed" in warning


def test_interruption_before_training_saves_nothing(bench: Bench) -> None:
    """An interruption before training saves no checkpoint and causes no warning."""
    assert bench.keeper.save_interrupted() == []
    assert bench.directory.read_newest(pytest.fail) is None
    assert bench.keeper.newest is None


def test_failed_fit_is_not_saved(bench: Bench) -> None:
    """The state of a failed fit is not saved."""
    bench.keeper.on_phase(Phase.RUNNING)
    bench.master.commit = 33
    bench.keeper.close_failed()
    assert bench.directory.read_newest(pytest.fail) is None


def test_unwritable_directory_causes_warnings_not_error(tmp_path: Path) -> None:
    """A directory that cannot be written to causes warnings, not an error."""
    bench = Bench(tmp_path / "gone")
    (tmp_path / "gone").write_text("a file in its place")
    bench.keeper.on_phase(Phase.RUNNING)
    bench.look(2)
    bench.master.states[0].set_result(())
    bench.wait()
    warned, unsaved = bench.keeper.finish(bench.master.snapshot(), 9, {})
    assert "training continues" in warned
    assert "no checkpoint is saved" in unsaved


def make_partition_state(partition: int, step: int) -> bytes:
    """Return the optimizer state of a partition's worker after this number of publications."""
    return encode_state({PUBLICATIONS: step, "partition": partition})


def publications(state: bytes) -> Any:
    return decode_state_untrusted(state)[PUBLICATIONS]


def read_publication_counts(bench: Bench) -> tuple[Any, dict[int, Any]]:
    """Return the publications of the common optimizer state and of the workers' own ones."""
    states = bench.newest().states
    own = {index: publications(state) for index, state in states.own.items()}
    return publications(states.one), own


def test_worker_that_sent_no_state_has_no_own_state(tmp_path: Path) -> None:
    """With "all", a worker that sent no state for a checkpoint has no own state in it."""
    bench = Bench(tmp_path, updaters="all")
    bench.keeper.on_phase(Phase.RUNNING)
    expected = []
    for commits, came in ((2, (1, 0)), (4, (0,)), (6, ())):
        bench.look(commits)
        copies = tuple(make_partition_state(partition, commits) for partition in came)
        bench.master.states[-1].set_result(copies)
        bench.wait()
        expected.append(read_publication_counts(bench))
    assert bench.master.everybody
    assert expected == [(2, {0: 2, 1: 2}), (4, {0: 4}), (4, {})]
    assert bench.newest().missing_states == (0, 1)


def test_last_checkpoint_keeps_previous_states_of_silent_workers(tmp_path: Path) -> None:
    """At the end, workers without a fresh copy keep their states of the previous checkpoint."""
    bench = Bench(tmp_path, updaters="all")
    bench.keeper.on_phase(Phase.RUNNING)
    bench.look(2)
    bench.master.states[0].set_result((make_partition_state(1, 2), make_partition_state(0, 2)))
    bench.wait()
    bench.keeper.on_phase(Phase.DRAINING)
    bench.master.optimizer_copies = (make_partition_state(0, 9),)
    bench.keeper.finish(bench.master.snapshot(), 9, {})
    assert read_publication_counts(bench) == (9, {0: 9, 1: 2})


def test_state_without_partition_is_common_to_all_workers(tmp_path: Path) -> None:
    """A state of partition -1, as rounds have before the first average, is for all workers."""
    bench = Bench(tmp_path, updaters="all")
    bench.keeper.on_phase(Phase.RUNNING)
    bench.look(2)
    bench.master.states[-1].set_result((make_partition_state(-1, 2),))
    bench.wait()
    assert read_publication_counts(bench) == (2, {})


def test_single_requested_state_is_common_to_all_workers(bench: Bench) -> None:
    """With "one", one worker's state is requested, and it is common to all workers."""
    bench.keeper.on_phase(Phase.RUNNING)
    bench.look(2)
    bench.master.states[0].set_result((make_partition_state(1, 2),))
    bench.wait()
    assert not bench.master.everybody
    assert read_publication_counts(bench) == (2, {})
    assert bench.newest().missing_states == ()
