"""Tests of checkpoints with each worker's optimizer state, which its partition's worker resumes."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from pyspark import TaskContext, cloudpickle

from sparkstrom import SharedTrainingMaster, SparkNetwork
from sparkstrom.models import Adam, DenseNetwork
from sparkstrom.models.base import State
from sparkstrom.runtime.optimizer_states import decode_optimizer_state

WORKERS, EPOCHS = 2, 15


def digest(state: State) -> str:
    """Return the number of steps and a digest of the means and squares of an Adam state."""
    content = np.asarray(state["mean"]).tobytes() + np.asarray(state["square"]).tobytes()
    return f"{state['steps']} {hashlib.sha256(content).hexdigest()}"


class StateRecordingNetwork(DenseNetwork):
    """A network that writes a digest of the state that it loads to a file of its partition."""

    folder: ClassVar[str]  # pickled by value with the class

    def load_updater_state(self, state: State) -> None:
        super().load_updater_state(state)
        context = TaskContext.get()
        if context is not None:
            (Path(self.folder) / f"{context.partitionId()}").write_text(
                digest(self.updater_state())
            )


@pytest.fixture
def _by_value() -> Iterator[None]:
    """Pickle this module's classes by value, because executors cannot import it."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def make_recording_network(folder: Path) -> StateRecordingNetwork:
    folder.mkdir()
    StateRecordingNetwork.folder = str(folder)
    return StateRecordingNetwork(
        [64, 32, 10], hidden="relu", loss="cross_entropy", updater=Adam(3e-3), seed=1
    )


def read_loaded_states(folder: Path) -> dict[int, str]:
    return {int(path.name): path.read_text() for path in folder.iterdir()}


def read_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Read a checkpoint with plain NumPy; return its description and a digest of each state."""
    with np.load(path) as file:
        said = json.loads(file["description.json"])["description"]
        names = [name for name in file.files if name.startswith("state")]
        return said, {name: digest(decode_optimizer_state(file[name].tobytes())) for name in names}


@pytest.mark.slow
@pytest.mark.usefixtures("_by_value")
@pytest.mark.flips("SharedTrainingMaster.checkpoint_updaters")
def test_workers_resume_optimizer_states_of_their_partitions(spark, digits, tmp_path):
    """Workers resume the states of their partitions, or one state if others were not saved.

    Workers have different rows and therefore different states.
    """
    data = spark.sparkContext.parallelize(digits.rows(), WORKERS)
    files = {}
    for updaters in ("all", "one"):
        directory = tmp_path / updaters
        master = SharedTrainingMaster(
            workers_per_node=1,
            debug_longer_iterations=10,
            checkpoint_directory=str(directory),
            checkpoint_every="0.5 s",
            checkpoint_updaters=updaters,
            keep_last=1000,
        )
        network = SparkNetwork(
            spark, make_recording_network(tmp_path / f"begun {updaters}"), master, keep=False
        )
        assert network.fit(data, epochs=EPOCHS).replicas_equal
        network.close()
        files[updaters] = sorted(directory.iterdir())

    whole = [
        path for path in files["all"] if len(read_checkpoint(path)[0]["updaters"]["own"]) == WORKERS
    ]
    midway = [path for path in whole if read_checkpoint(path)[0]["epochs_done"] is None]
    said, states = read_checkpoint(midway[-1])
    own = {int(index): states[name] for index, name in said["updaters"]["own"].items()}
    assert len(states) == WORKERS  # each once
    assert len(set(own.values())) == WORKERS
    assert said["updaters"]["left_out"] == []
    for index, (epoch, batch, _, _, per_epoch) in enumerate(said["partitions"]):
        steps = int(own[index].split()[0])
        assert steps > (epoch * per_epoch + batch) / 2  # not the state of the first checkpoint
    assert resume_fit(spark, midway[-1], data, tmp_path / "all again") == own

    of_one = [path for path in files["one"] if read_checkpoint(path)[0]["epochs_done"] is None][-1]
    said, states = read_checkpoint(of_one)
    assert said["updaters"] == {"wanted": "one", "own": {}, "left_out": []}
    found = resume_fit(spark, of_one, data, tmp_path / "one again")
    assert found == dict.fromkeys(range(WORKERS), states["state"])

    # with another partitioning, all workers begin with the same state
    spread = spark.sparkContext.parallelize(digits.rows(), 2 * WORKERS)
    said, states = read_checkpoint(midway[-1])
    found = resume_fit(spark, midway[-1], spread, tmp_path / "more", workers_per_node=2)
    assert found == dict.fromkeys(range(2 * WORKERS), states["state"])


@pytest.mark.slow
@pytest.mark.usefixtures("_by_value")
def test_last_checkpoint_of_short_fit_has_final_states(spark, digits, tmp_path):
    """A fit of less than a second waits at its end for all workers' states."""
    data = spark.sparkContext.parallelize(digits.rows(), WORKERS)
    master = SharedTrainingMaster(
        workers_per_node=1,
        checkpoint_directory=str(tmp_path / "kept"),
        checkpoint_updaters="all",
    )
    network = SparkNetwork(spark, make_recording_network(tmp_path / "begun"), master, keep=False)
    for epochs in (1, 2):
        assert network.fit(data, epochs=epochs).replicas_equal
        said, states = read_checkpoint(max((tmp_path / "kept").iterdir()))
        assert said["epochs_done"] == epochs
        assert said["updaters"]["left_out"] == []
        for index, (_, _, _, _, per_epoch) in enumerate(said["partitions"]):
            steps = int(states[said["updaters"]["own"][str(index)]].split()[0])
            assert steps >= epochs * per_epoch, f"partition {index} in fit of {epochs} epochs"
    network.close()


def resume_fit(
    spark: Any, path: Path, data: Any, folder: Path, workers_per_node: int = 1
) -> dict[int, str]:
    """Resume a fit from the file; return digests of the states that its workers loaded."""
    master = SharedTrainingMaster(workers_per_node=workers_per_node)
    network = SparkNetwork(spark, make_recording_network(folder), master, keep=False)
    network.restore(path)
    summary = network.fit(data, epochs=EPOCHS)
    network.close()
    assert summary.resumed_from == str(path)
    assert summary.replicas_equal
    return read_loaded_states(folder)
