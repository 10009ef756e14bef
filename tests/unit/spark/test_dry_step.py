"""Tests of the dry step: it finds mistakes on the first rows and changes no state."""

from __future__ import annotations

import os
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.data.row_blocks import Block, count_rows, read_row_blocks
from sparkstrom.fit import trained_network as dry_step
from sparkstrom.fit.trained_network import dry_run_step
from sparkstrom.models import DenseNetwork
from sparkstrom.spark.data import partitioning as first_rows
from sparkstrom.spark.data.partitioning import RowSource, read_first_blocks, run_with_timeout
from sparkstrom.spark.executor.entry_points import pickle_by_value
from sparkstrom.spark.ml.estimator import SparkstromEstimator, _EstimatorNetwork
from tests.unit.spark.test_estimator_columns import FRAME

os.environ.setdefault("KERAS_BACKEND", "jax")  # before Keras is imported
torch: Any = pytest.importorskip("torch", reason="torch is not installed")
nn = torch.nn


def numpy_state() -> Any:
    state: Any = np.random.get_state()
    return state[1]


def make_reader(*rows: Any) -> Callable[[], Iterator[Block]]:
    """Return a function that reads these rows as blocks of partition 0."""
    return lambda: read_row_blocks(0, rows)


def make_class_reader(
    width: int = 3, label: Any = 1, rows: int = 2
) -> Callable[[], Iterator[Block]]:
    """Return a reader of rows with this number of features and this label."""
    return make_reader(*[(np.arange(width, dtype=np.float32), label)] * rows)


def try_model(model: Any, first: Any, metric: str | None = None) -> None:
    """Run a dry step of a model on its first rows."""
    dry_run_step(model, model.initial(), first, pickle_by_value, metric)


def torch_model(*layers: Any, loss: Any = None) -> Any:
    from sparkstrom.models.torch import TorchModel

    module = nn.Sequential(*(layers or (nn.Linear(3, 2),)))
    return TorchModel(
        module,
        loss=loss or nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    )


def keras_model() -> Any:
    pytest.importorskip("jax", reason="jax is not installed")
    keras: Any = pytest.importorskip("keras", reason="keras is not installed")
    from sparkstrom.models.keras import KerasModel

    net = keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.5), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return KerasModel(net, loss=loss, optimizer=keras.optimizers.Adam())


def jax_model() -> Any:
    pytest.importorskip("jax", reason="jax is not installed")
    pytest.importorskip("optax", reason="optax is not installed")
    import optax

    from tests.unit.models.mlp_in_jax import make

    return make(optax.sgd(0.1))


def lightning_model() -> Any:
    lightning: Any = pytest.importorskip(
        "pytorch_lightning", reason="pytorch_lightning is not installed"
    )
    from sparkstrom.models.lightning import LightningModel

    class Net(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Any) -> Any:
            return self.layer(x)

        def training_step(self, batch: Any, index: int) -> Any:
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return LightningModel(Net())


KINDS = {
    "built in": lambda: DenseNetwork([3, 4, 2]),
    "torch": torch_model,
    "Keras": keras_model,
    "JAX": jax_model,
    "Lightning": lightning_model,
}


@pytest.mark.parametrize("kind", KINDS)
def test_dry_step_changes_no_parameters_or_random_states(kind: str) -> None:
    """A dry step changes neither parameters and buffers nor random states."""
    model = KINDS[kind]()
    parameters = model.initial().copy()
    before = parameters.copy()
    chance = random.getstate(), numpy_state().copy(), torch.get_rng_state().clone()
    buffers = model.buffers_bytes() if hasattr(model, "buffers_bytes") else b""
    metric = None if kind == "Lightning" else "loss"  # its module has no validation_step
    dry_run_step(
        model,
        parameters,
        make_class_reader(width=6 if kind == "JAX" else 3),
        pickle_by_value,
        metric,
    )
    np.testing.assert_array_equal(parameters, before)
    np.testing.assert_array_equal(model.initial(), before)
    assert random.getstate() == chance[0]
    np.testing.assert_array_equal(numpy_state(), chance[1])
    assert torch.equal(torch.get_rng_state(), chance[2])
    assert buffers == (model.buffers_bytes() if hasattr(model, "buffers_bytes") else b"")


def test_outputs_that_an_estimator_cannot_use_are_refused_before_training() -> None:
    """A dry step refuses a model whose outputs the estimator cannot put into columns."""
    model = torch_model(nn.Conv1d(3, 5, 1))
    examine = make_output_check(model, SparkstromEstimator(labelCol="steps"))
    first = make_reader(*[(np.zeros((3, 4), np.float32), np.zeros(4, np.int64))] * 2)
    try_model(model, first)
    with pytest.raises(UsageError, match=r"the model returns \[5, 4\] for a row"):
        dry_run_step(model, model.initial(), first, pickle_by_value, None, examine)


@pytest.mark.parametrize(("outputs", "names"), [("values", 1), ("logits", 3)])
def test_outputs_without_columns_may_have_any_shape(outputs: str, names: int) -> None:
    """Outputs may have any shape if the columns made of them are off; "values" has only one."""
    model: Any = SimpleNamespace(outputs=outputs, loss=abs, penalty=abs)  # meets ``Measured``
    model.predict = lambda _: np.zeros((2, 3, 4), np.float32)
    batch: Any = SimpleNamespace(features=np.zeros((2, 3), np.float32))
    columns = ("predictionCol", "probabilityCol", "rawPredictionCol")[:names]
    estimator = SparkstromEstimator(**dict.fromkeys(columns, ""))
    make_output_check(model, estimator)(model, batch)
    estimator.set(estimator.getParam(columns[-1]), "outputs")
    with pytest.raises(UsageError, match="the model returns"):
        make_output_check(model, estimator)(model, batch)


def make_output_check(model: Any, estimator: SparkstromEstimator) -> Any:
    """Return an estimator's check of a dry step's outputs."""
    network: Any = _EstimatorNetwork.__new__(_EstimatorNetwork)
    network._choose_converter = partial(estimator._choose_converter, model, FRAME)
    return network._examine_outputs


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("built in", "rows have 7 features, the network takes 3"),
        ("torch", r"features float32\[8, 7\]: .* cannot be multiplied \(8x7 and 3x2\)"),
        ("Lightning", r"batch \(float32\[8, 7\], .* cannot be multiplied \(8x7 and 3x2\)"),
    ],
)
def test_wrong_number_of_features_raises_usage_error(kind: str, words: str) -> None:
    """The error names the number of features of the rows and that which the model takes."""
    with pytest.raises(UsageError, match=words):
        try_model(KINDS[kind](), make_class_reader(width=7))


@pytest.mark.parametrize("kind", ["built in", "torch"])
def test_invalid_class_label_error_names_row(kind: str) -> None:
    with pytest.raises(UsageError, match=r"row 0 of partition 0: .* is 7: labels must be 0 to 1"):
        try_model(KINDS[kind](), make_class_reader(label=7))


def test_loss_that_does_not_fit_labels_raises_usage_error() -> None:
    model = torch_model(nn.Linear(3, 1), loss=nn.BCEWithLogitsLoss())
    with pytest.raises(UsageError, match=r'label=\["y"\]'):
        try_model(model, make_class_reader(label=1.0))


def test_nan_feature_error_names_row() -> None:
    first = make_reader(([1.0, 2.0, 3.0], 1), ([1.0, np.nan, 3.0], 0))
    with pytest.raises(UsageError, match="row 1 of partition 0"):
        try_model(DenseNetwork([3, 2]), first)


def test_dry_step_works_with_one_row_and_batch_norm() -> None:
    """A dry step works with a single row and BatchNorm, and leaves its statistics as they were."""
    model = torch_model(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    before = model.buffers_bytes()
    try_model(model, make_class_reader(rows=1), "loss")
    assert model.buffers_bytes() == before


def test_dry_step_ignores_read_errors_and_missing_rows() -> None:
    """Errors in reading rows, and missing rows, are ignored; workers will report them."""

    def fails() -> Iterator[Block]:
        raise OSError("no such file")

    try_model(DenseNetwork([3, 2]), fails)
    try_model(DenseNetwork([3, 2]), make_reader())
    try_model(DenseNetwork([3, 2]), None)


def test_concurrent_dry_steps_hide_only_their_own_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two dry steps at a time hide their own output, and not that of other threads."""
    before, inside, may_end = sys.stdout, threading.Event(), threading.Event()

    def first() -> None:
        with dry_step.preserve_process_state():
            print("said in a dry step")
            inside.set()
            assert may_end.wait(30)

    def second() -> None:
        with dry_step.preserve_process_state():
            print("said in another")

    threads = [threading.Thread(target=each) for each in (first, second)]
    for thread in threads:
        thread.start()
        assert inside.wait(30)
    print("said by the program")
    may_end.set()
    for thread in threads:
        thread.join()
    assert sys.stdout is before
    assert capsys.readouterr().out == "said by the program\n"


def test_dry_step_works_without_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry step works if sys.stdout is None, and leaves it None."""
    monkeypatch.setattr(sys, "stdout", None)
    with dry_step.preserve_process_state():
        print("said to nobody, by this thread and others")
        assert sys.stdout is None


class UnsavableStateModel(DenseNetwork):
    """A custom model, whose optimizer's state cannot be saved."""

    def updater_state(self) -> Any:
        return super().updater_state() | {"seen": {1}}


def test_optimizer_state_that_cannot_be_saved_is_refused() -> None:
    with pytest.raises(UsageError, match="contains 'seen', a set"):
        try_model(UnsavableStateModel([3, 2]), None)


def test_custom_and_large_models_do_no_dry_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Models with a user's own code, and large models, do no dry step."""

    class Own(DenseNetwork):
        """A user's model, whose step could have any side effects."""

    try_model(Own([3, 2]), make_class_reader(width=4))
    monkeypatch.setattr(dry_step, "PARAMETERS_MAX", 3)
    try_model(DenseNetwork([3, 2]), make_class_reader(width=4))


# -- rows of the first partition -------------------------------------------------------------------


class FakeJob:
    """A Spark job with these results, which ends in time or not."""

    error: Exception | None = None
    cancelled = False

    def __init__(self, reports: list[Any], *, in_time: bool = True) -> None:
        self.reports, self.in_time = reports, in_time

    def start(self) -> None: ...

    def wait(self, seconds: float) -> bool:
        return self.in_time

    def cancel(self) -> None:
        self.cancelled = True


def test_first_rows_job_is_cancelled_after_timeout() -> None:
    """A job that takes too long is cancelled; like a failed job, it gives no rows."""
    late: Any = FakeJob([1], in_time=False)
    assert run_with_timeout(late) == []
    assert late.cancelled
    failed: Any = FakeJob([1])
    failed.error = ValueError("of the user's")
    assert run_with_timeout(failed) == []


class FakeRdd:
    """An RDD of ten partitions with 1,000 rows from partition ``first_full`` on, none before."""

    def __init__(self, first_full: int) -> None:
        self.first_full, self.drawn = first_full, list[int]()  # partition of each row drawn

    def getNumPartitions(self) -> int:
        return 10

    def mapPartitionsWithIndex(self, task: Any) -> Any:
        return lambda index: task(index, self.rows(index))

    def rows(self, index: int) -> Iterator[Any]:
        for number in range(1000 if index >= self.first_full else 0):
            self.drawn.append(index)
            yield [float(number)], 0


def run_job(rdd: Any, function: Any, partitions: Sequence[int]) -> list[Any]:
    """Do what a SparkContext's runJob does."""
    return [found for index in partitions for found in function(rdd(index))]


@pytest.mark.parametrize(("first_full", "read"), [(0, [0]), (3, [3, 4]), (9, [9]), (10, [])])
def test_first_rows_come_from_first_nonempty_partition(
    first_full: int, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty partitions, as after a filter, do not keep the trial step from finding rows."""
    monkeypatch.setattr(
        first_rows, "SparkJob", lambda _, __, runner, description: FakeJob(runner())
    )
    rdd: Any = FakeRdd(first_full)
    source = RowSource(rdd, read_row_blocks, count_rows)
    blocks = list(read_first_blocks(SimpleNamespace(runJob=run_job), source))
    assert Counter(rdd.drawn) == dict.fromkeys(read, first_rows.FIRST_ELEMENTS)
    assert [len(block.records) for block in blocks] == [first_rows.FIRST_ELEMENTS] * bool(read)
    assert {block.where for block in blocks} == {f"partition {index}" for index in read[:1]}
