"""Tests of all kinds of models, with momentum, in both training modes: fits end and are resumed.

All of them train in the same two processes, one after the other. ``SPARKSTROM_KINDS=all`` tests
each kind in each mode; by default only some, because each imports and compiles in every process.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np
import pytest

from sparkstrom import ParallelWrapper, TrainingError
from sparkstrom.checkpoint.directory import open_checkpoint
from sparkstrom.data.column_selection import ColumnSpec
from sparkstrom.local.data import partition_rows, read_data_blocks
from sparkstrom.runtime.optimizer_states import decode_optimizer_state
from sparkstrom.worker.task_environment import TaskEnvironment, load_batches
from tests.integration import model_kinds
from tests.integration.averaged_rounds import train_in_one_process
from tests.integration.checkpoint.checkpoint_progress import read_checkpoint_progress
from tests.integration.model_kinds import BY_CHANCE, KINDS, select_kinds

WORKERS, ROWS, BATCH, FREQUENCY = 2, 256, 16, 3
PER_EPOCH = ROWS // BATCH  # minibatches of both workers, all full, so that models compile once
CHEAP = ("dl4j-dense", "own")  # kinds without compilation
EPOCHS_MAX = 10_000  # of a fit that a listener ends
SLEEP_MS = 20  # in each step, so that few epochs pass until the end
COMMON = {
    "batch_size_per_worker": BATCH,
    "progress": False,
    "debug_longer_iterations": SLEEP_MS,
}
AVERAGING = {**COMMON, "training_mode": "AVERAGING", "averaging_frequency": FREQUENCY}


@pytest.fixture(scope="module")
def digits() -> tuple[Any, Any]:
    from sklearn.datasets import load_digits

    data = load_digits()
    return (data.data[:ROWS] / 16).astype(np.float32), data.target[:ROWS]


@pytest.fixture(scope="module", autouse=True)
def kinds_by_value() -> Iterator[None]:
    """Send the models' code to the worker processes, which cannot import the tests."""
    cloudpickle.register_pickle_by_value(model_kinds.by_value())
    yield
    cloudpickle.unregister_pickle_by_value(model_kinds.by_value())


class StoppingListener:
    """A listener that ends a fit at its first checkpoint."""

    def on_checkpoint(self, event: Any) -> None:
        raise RuntimeError("enough")


def fit_until_first_checkpoint(made: ParallelWrapper, digits: Any) -> tuple[Path, int]:
    """Run a fit that a listener ends; return its newest checkpoint and the epochs to resume to.

    At least one whole epoch remains after the checkpoint.
    """
    with pytest.raises(TrainingError, match="enough"):
        made.fit(digits, epochs=EPOCHS_MAX, listeners=[StoppingListener()])
    newest = max(Path(str(made.checkpoint_directory)).iterdir())
    return newest, read_checkpoint_progress(str(newest), BATCH).minibatches // PER_EPOCH + 2


def compute_expected_rounds(
    made: ParallelWrapper, digits: Any, tmp_path: Path, epochs: int, save_updater: Any
) -> Any:
    """Return the parameters after the wrapper's first fit, by the arithmetic in one process."""
    model, directory = made._model, tmp_path / "dealt"
    directory.mkdir()
    files = partition_rows(
        read_data_blocks(digits, ColumnSpec()), WORKERS, made._master.rng_seed, directory
    )
    spec = SimpleNamespace(fraction=0.0, first_epoch=0)
    job: Any = SimpleNamespace(spec=spec, model=model, master=made._master, rows=())
    each = [
        load_batches(job, TaskEnvironment(p, 0, "here", "here", directory), file.blocks())
        for p, file in enumerate(files)
    ]
    return train_in_one_process(model, each, epochs, frequency=FREQUENCY, save_updater=save_updater)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "averages"),
    [
        *((kind, True) for kind in select_kinds("jax", "keras", "lightning", "own")),
        ("dl4j-dense", False),
    ],
)
def test_resumed_rounds_equal_uninterrupted_rounds(
    pooled_wrapper: Any, digits: Any, tmp_path: Path, kind: str, averages: bool
) -> None:
    """Resumed rounds equal uninterrupted ones, with averaged or with each worker's optimizers."""
    options = AVERAGING | {
        "average_updaters": averages,
        "checkpoint_directory": str(tmp_path / "kept"),
        "checkpoint_every": "3 updates",
    }
    newest, epochs = fit_until_first_checkpoint(pooled_wrapper(KINDS[kind](), **options), digits)
    made = pooled_wrapper(KINDS[kind](), **options)
    wanted = compute_expected_rounds(made, digits, tmp_path, epochs, True if averages else "own")
    print(f"{epochs} epochs")
    summary = made.fit(digits, epochs=epochs)
    assert summary.resumed_from == str(newest)
    assert 0 < summary.minibatches_resumed < summary.minibatches == summary.minibatches_expected
    assert summary.replicas_equal
    assert not [text for text in summary.warnings if "optimizer" in text]
    if kind not in BY_CHANCE:
        np.testing.assert_allclose(made.parameters, wanted, atol=5e-6)
    if kind not in CHEAP:
        return
    # a further fit continues the optimizer states, kept in the program or read from the file
    made.fit(digits)
    for path in (tmp_path / "kept").iterdir():
        if path.name > Path(summary.checkpoint).name:
            path.unlink()
    again = pooled_wrapper(KINDS[kind](), **options)
    again.fit(digits, epochs=epochs)
    assert again.fit(digits).minibatches == PER_EPOCH
    np.testing.assert_array_equal(again.parameters, made.parameters)


@pytest.mark.slow
@pytest.mark.parametrize("kind", select_kinds("jax", "keras", "dl4j-module", "own"))
def test_resumed_gradient_sharing_trains_each_minibatch_once(
    pooled_wrapper: Any, digits: Any, tmp_path: Path, kind: str
) -> None:
    """A resumed fit has equal replicas, each minibatch once, and a resumed optimizer state."""
    options = COMMON | {
        "checkpoint_directory": str(tmp_path),
        "checkpoint_every": "0.2 s",
        "keep_last": 100,
    }
    newest, epochs = fit_until_first_checkpoint(pooled_wrapper(KINDS[kind](), **options), digits)
    _, saved = open_checkpoint(str(newest), print)
    before = decode_optimizer_state(saved.arrays["state"].tobytes())
    made = pooled_wrapper(KINDS[kind](), **options)
    print(f"{epochs} epochs")
    summary = made.fit(digits, epochs=epochs)
    assert summary.resumed_from == str(newest)
    assert 0 < summary.minibatches_resumed < summary.minibatches == summary.minibatches_expected
    assert summary.minibatches == epochs * PER_EPOCH
    assert summary.replicas_equal, summary.hashes
    assert len(summary.hashes) == WORKERS + 1
    assert made.evaluate(digits).classification.accuracy > 0.5
    _, saved = open_checkpoint(str(tmp_path), print)
    after = decode_optimizer_state(saved.arrays["state"].tobytes())
    assert after.keys() == before.keys()
    changed = [name for name in after if np.any(np.asarray(after[name]) != before[name])]
    assert changed or not after
    for name in after:
        if isinstance(after[name], int) and name in changed:  # a count of steps
            assert after[name] > before[name], name
    if kind in CHEAP:
        assert made.fit(digits).grants == WORKERS  # each worker gets its kept residual back
