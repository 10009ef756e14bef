"""Tests of inference without Spark: cached models, predictions of rows and columns, metrics."""

from __future__ import annotations

import contextlib
import gc
import pickle
import weakref
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.data import arrow_conversion as arrow
from sparkstrom.data import row_blocks
from sparkstrom.data.column_selection import FEATURES as ROLE
from sparkstrom.data.column_selection import (
    ArraySource,
    ArrowReadPlan,
    arrays_to_batch,
    features_to_arrays,
)
from sparkstrom.fit.evaluation import MetricSpec, evaluate_batch, merge_evaluations, select_metrics
from sparkstrom.models import DenseNetwork
from sparkstrom.models.base import Batch
from sparkstrom.models.output_interpretation import predict_flattened
from sparkstrom.spark.executor import inference
from sparkstrom.spark.executor.inference import (
    CACHED_MODELS_MAX,
    TrainedModel,
    get_open_model,
    predict_columns,
    predict_pairs,
    predict_rows,
    resolve_output_columns,
    to_arrow_array,
    to_pandas,
)
from sparkstrom.worker import task_environment

random = np.random.default_rng(4)
FEATURES = random.normal(size=(50, 3)).astype(np.float32)
LABELS = random.integers(0, 2, 50)


@pytest.fixture(autouse=True)
def empty_model_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test an empty cache of models."""
    monkeypatch.setattr(inference, "_open_models", type(inference._open_models)())
    monkeypatch.setattr(inference, "_removed_models", type(inference._removed_models)())


def make_trained_model(seed: int = 1) -> TrainedModel:
    model = DenseNetwork([3, 4, 2], seed=seed)
    return TrainedModel.from_model(model, model.initial())


def make_broadcast(one: TrainedModel) -> Any:
    """Return a fake broadcast variable with a pickled and unpickled copy of the model."""
    return SimpleNamespace(value=pickle.loads(pickle.dumps(one)))


class ScaledModel(DenseNetwork):
    """A model whose description omits ``factor``, as those of JAX and torch models omit code."""

    factor = 2

    def describe(self) -> dict[str, Any]:
        return {"kind": "doubled"}

    def __getstate__(self) -> dict[str, Any]:
        return {"factor": self.factor}

    def predict(self, features: Any) -> Any:
        return self.factor * super().predict(features)


def test_models_with_equal_descriptions_are_cached_separately() -> None:
    """Models that differ only in an attribute outside their descriptions are cached separately."""
    model, other = ScaledModel([3, 4, 2], seed=1), ScaledModel([3, 4, 2], seed=1)
    other.factor = 3
    found = [get_open_model(TrainedModel.from_model(one, one.initial())) for one in (model, other)]
    twice, thrice = (one.predict(FEATURES) for one in found)
    np.testing.assert_allclose(thrice, 1.5 * twice, rtol=1e-6)


def test_same_model_is_opened_once_per_process() -> None:
    first = get_open_model(make_broadcast(make_trained_model()).value)
    assert get_open_model(make_broadcast(make_trained_model()).value) is first
    assert get_open_model(make_broadcast(make_trained_model(2)).value) is not first
    assert len(inference._open_models) == 2


def test_cache_keeps_only_most_recently_used_models() -> None:
    """Only the CACHED_MODELS_MAX most recently used models stay open."""
    first, second, *_ = [
        get_open_model(make_trained_model(seed)) for seed in range(CACHED_MODELS_MAX)
    ]
    get_open_model(make_trained_model(0))  # now the second one has not been used for longest
    get_open_model(make_trained_model(CACHED_MODELS_MAX))
    assert len(inference._open_models) == CACHED_MODELS_MAX
    assert get_open_model(make_trained_model(0)) is first
    assert get_open_model(make_trained_model(1)) is not second


def test_digest_depends_on_parameters_and_architecture() -> None:
    one = make_trained_model()
    moved = TrainedModel.from_model(one.model, one.parameters + np.float32(1))
    other = TrainedModel.from_model(DenseNetwork([3, 4, 2], hidden="tanh", seed=1), one.parameters)
    assert len({one.digest, moved.digest, other.digest}) == 3


def test_torch_attribute_changes_digest_but_prediction_does_not() -> None:
    """A torch module's buffer or attribute changes the digest; a prediction does not change it."""
    torch = pytest.importorskip("torch")
    from sparkstrom.models.torch import TorchModel

    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    module.register_buffer("temperature", torch.ones(1), persistent=False)
    model = TorchModel(module, torch.nn.CrossEntropyLoss(), partial(torch.optim.SGD, lr=0.1))
    digests = []
    for temperature in (1.0, 1.0, 5.0):
        module.temperature.fill_(temperature)
        digests.append(TrainedModel.from_model(model, np.zeros(model.n_params, np.float32)).digest)
        model.bind(model.initial())
        model.predict(FEATURES)
    module.calibrated = True
    digests.append(TrainedModel.from_model(model, np.zeros(model.n_params, np.float32)).digest)
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def make_read_plan(schema: pa.Schema) -> ArrowReadPlan:
    """Return a plan that reads each column as one array of the features."""
    takes = tuple(ArraySource(ROLE, (name,), (i,), False) for i, name in enumerate(schema.names))
    nest = tuple(schema.names) if len(takes) > 1 else None
    return ArrowReadPlan(schema.serialize().to_pybytes(), takes, nest, 0, False, False)


LISTS = pa.schema([("x", pa.list_(pa.float32()))])


def predict_batches(batches: list[Any], schema: pa.Schema = LISTS, model: Any = None) -> list[Any]:
    """Return the predictions that Spark would get back, row by row."""
    names: dict[str | int, str] = {0: "prediction"}
    ship = (
        SimpleNamespace(value=TrainedModel.from_model(model, model.initial()))
        if model
        else make_broadcast(make_trained_model())
    )
    made = predict_columns(
        ship, partial(to_pandas, names), make_read_plan(schema), "partition 2", batches
    )
    return [one for part in made for one in part]


def test_row_and_column_predictions_are_equal() -> None:
    wanted = predict_flattened(make_trained_model().open(), FEATURES)
    by_rows = list(predict_rows(make_broadcast(make_trained_model()), 0, FEATURES))
    column = pa.array(FEATURES.tolist(), LISTS.field("x").type).to_pandas()
    by_column = predict_batches([column[:20], column[:0], column[20:]])
    np.testing.assert_array_equal(by_rows, wanted)
    np.testing.assert_array_equal(by_column, wanted)


def test_predict_pairs_reads_one_block_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and rows are read one block at a time, not for the whole partition at once."""
    monkeypatch.setattr(row_blocks, "BLOCK_BYTES", 1 << 10)
    read: list[int] = []

    def pairs() -> Iterator[Any]:
        for i in range(4000):
            read.append(i)
            yield i, FEATURES[i % len(FEATURES)]

    found = predict_pairs(make_broadcast(make_trained_model()), 0, pairs())
    key, _ = next(found)
    assert key == 0
    assert len(read) < 500
    assert [key for key, _ in found] == list(range(1, 4000))


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (None, "column 'x' is null"),
        ([1.0], "column 'x' has 1 values where earlier ones have 3"),
        ([1.0, np.nan, 2.0], r"column 'x' is null or nan at \[1\]: fill or drop it"),
        ([1.0, 2.0, np.inf], r"column 'x' is inf at \[2\]"),
    ],
)
def test_invalid_row_is_named_by_row_and_partition(bad: Any, why: str) -> None:
    """A null, NaN, infinite or short row is refused by its number and partition."""
    good = [np.ones(3, np.float32)] * 4
    batches = [pd.Series(good), pd.Series([*good[:1], None if bad is None else np.array(bad)])]
    with pytest.raises(UsageError, match=f"row 5 of partition 2: {why}"):
        predict_batches(batches)


def test_rejected_rows_error_names_partition() -> None:
    """Rows of a wrong shape or kind are refused with a message that names their partition."""
    with pytest.raises(UsageError, match=r"fails on rows of partition 2 with features 'x': \[4\]"):
        predict_batches([pd.Series([np.ones(4, np.float32)])])
    with pytest.raises(UsageError, match=r"fails on rows of partition 0 with features 'features'"):
        list(predict_rows(make_broadcast(make_trained_model()), 0, [[1.0, 2.0]]))
    with pytest.raises(UsageError, match=r"row 1 of partition 0 is 'x': features must be numbers"):
        list(predict_rows(make_broadcast(make_trained_model()), 0, [[1.0, 2.0, 3.0], "x"]))


VECTOR = pa.struct(
    [
        ("type", pa.int8()),
        ("size", pa.int32()),
        ("indices", pa.list_(pa.field("element", pa.int32(), nullable=False))),
        ("values", pa.list_(pa.field("element", pa.float64(), nullable=False))),
    ]
)
COLUMNS = [
    pa.array([1, 2, 3], pa.int16()),
    pa.array([True, None, False]),
    pa.array([1.5, 2.5, -1.0], pa.float64()),
    pa.array([b"ab", None, b""]),
    pa.array([[1.0, 2.0], None, []], pa.list_(pa.float32())),
    pa.array([[1, 2], [3, None], [4]], pa.list_(pa.int32())),
    pa.array([[[1, 2], [3]], [], None], pa.list_(pa.list_(pa.int64()))),
    pa.array([None, None], pa.list_(pa.float32())),
    pa.array([[True, None], [False]], pa.list_(pa.bool_())),
    pa.array(
        [
            {"type": 1, "size": None, "indices": None, "values": [1.0, 2.0]},
            {"type": 0, "size": 2, "indices": [1], "values": [5.0]},
            None,
        ],
        VECTOR,
    ),
]


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: str(column.type)[:30])
def test_pandas_column_converts_back_to_same_arrow_column(column: pa.Array) -> None:
    """A column that Spark converted to pandas is converted back to the same Arrow column.

    As in Spark's worker, a struct is a DataFrame, and a null struct has nulls in all fields.
    """
    if pa.types.is_struct(column.type):
        given: Any = pd.concat([one.to_pandas() for one in column.flatten()], axis=1)
        given.columns = [field.name for field in VECTOR]
    else:
        given = column.to_pandas()
    assert to_arrow_array(given, column.type).equals(column)


class SwappedOutputsModel:
    """A model with the named inputs a and b and the named outputs b and a."""

    n_params = 1

    def initial(self) -> Any:
        return np.ones(1, np.float32)

    def bind(self, params: Any) -> None: ...

    def describe(self) -> dict[str, Any]:
        return {}

    def predict(self, features: Any) -> Any:
        return {"b": features["a"][:, None] * 2, "a": features["b"].astype(np.float32)}


def test_named_outputs_match_columns_and_keys() -> None:
    """Named outputs get their named columns or dictionary keys; other columns are refused."""
    schema = pa.schema([("a", pa.int64()), ("b", pa.list_(pa.float32()))])
    batch = (pd.Series([1, 2]), pd.Series([np.ones(2, np.float32)] * 2))
    reading = make_read_plan(schema)
    ship = SimpleNamespace(
        value=TrainedModel.from_model(SwappedOutputsModel(), np.ones(1, np.float32))
    )  # type: ignore[arg-type]
    make = partial(to_pandas, resolve_output_columns({"a": "first", "b": "second"}))
    frame = pd.concat(predict_columns(ship, make, reading, "here", [batch]))
    assert [list(row) for row in frame["o0"]] == [[1, 1], [1, 1]]
    assert [list(row) for row in frame["o1"]] == [[2], [4]]
    for wrong in ("one", ("x", "y"), {"a": "only"}):
        make = partial(to_pandas, resolve_output_columns(wrong))
        with pytest.raises(UsageError, match=r"returns a dictionary of \['b', 'a'\], the columns"):
            list(predict_columns(ship, make, reading, "here", [batch]))
    rows = [{"a": np.int64(1), "b": [1.0, 2.0]}, {"a": np.int64(3), "b": [0.0, 2.0]}]
    found = list(predict_rows(ship, 0, rows))
    assert [{name: one.tolist() for name, one in row.items()} for row in found] == [
        {"b": [2], "a": [1, 2]},
        {"b": [6], "a": [0, 2]},
    ]


def test_inputs_accepts_numpy_integer_but_not_bool() -> None:
    """A UDF's ``inputs`` may be an integer of NumPy, as its shapes may; booleans are refused."""
    inputs: Any = np.int64(2)
    inference.check_inputs(inputs, None)
    columns = [pd.Series([1, 2]), pd.Series([3, 4])]
    features = inference.series_to_features(columns, inputs, None)
    assert [array.ravel().tolist() for array in features] == [[1, 2], [3, 4]]
    with pytest.raises(UsageError, match="inputs=True: None where all columns are one array"):
        inference.check_inputs(True, None)


@pytest.mark.parametrize("value", [2**24 + 1, -(2**63)])
def test_rejects_output_integer_inexact_in_float32(value: int) -> None:
    def concatenate(value: int) -> Any:
        outputs: Any = SimpleNamespace(predict=lambda _: np.array([[value]]))
        return inference.OutputConcatenator(outputs).predict(FEATURES[:1])

    assert concatenate(2**24).tolist() == [[2.0**24]]
    with pytest.raises(UsageError, match=f"outputs the integer {value}, .* exact up to 16777216"):
        concatenate(value)


def test_score_is_nan_for_row_of_loss_weight_zero() -> None:
    """A row whose loss has weight 0 gets the score NaN; before, it was a division by zero."""
    model = DenseNetwork([3, 2])
    model.bind(model.initial())
    usual = model.loss
    model.loss = lambda batch: (0.0, 0.0) if batch.labels[0] == 1 else usual(batch)  # type: ignore[method-assign]
    (block,) = row_blocks.read_row_blocks(0, [([1.0, 2.0, 3.0], i) for i in (0, 1, 0)])
    assert np.isnan(inference.score_block(model, block, penalized=False)).tolist() == [
        False,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("names", "exact", "refused"),
    [
        (("p", "p"), True, "'p' and 'p' for outputs: give"),
        (("p", "P"), False, "'p' and 'P' for outputs, which Spark considers equal: give"),
        (("p", "P"), True, None),
        (("p", "q"), False, None),
        (("p", "Y"), False, "'Y' for outputs would replace the DataFrame's column 'y': give it"),
        (("y", "p"), True, "'y' for outputs would replace the DataFrame's column 'y': give it"),
        (("p", "Y"), True, None),
    ],
)
def test_output_columns_must_be_new_and_distinct(
    names: tuple[str, ...], exact: bool, refused: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs need new columns with different names; before, one replaced another."""
    added: list[str] = []
    conf = SimpleNamespace(get=lambda *_: str(exact).lower())
    frame: Any = SimpleNamespace(
        sparkSession=SimpleNamespace(conf=conf), columns=["x", "y"], drop=lambda _: frame
    )
    frame.withColumn = lambda name, column: added.append(name) or frame
    model: Any = SimpleNamespace(value=SimpleNamespace(digest="d"))
    monkeypatch.setattr(inference, "create_output_column", lambda *_: None)
    monkeypatch.setattr("pyspark.sql.functions.col", lambda name: name)
    with pytest.raises(UsageError, match=refused) if refused else contextlib.nullcontext():
        inference.add_output_columns(frame, model, "x", names)
    assert added == ([] if refused else ["sparkstrom_d", *names])


def test_images_are_predicted_in_blocks_of_256_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images are predicted 256 at a time, although the memory limit allows even fewer.

    Spark's batches have 10,000 rows, which may not fit in memory once decoded. The model computes
    blocks of 256 rows in any case, so smaller blocks would save nothing.
    """
    for module in (arrow, row_blocks):
        monkeypatch.setattr(module, "BLOCK_BYTES", 1200)
    seen: list[int] = []
    schema = pa.schema([("raw", pa.binary())])
    column = pd.Series([bytes([i, 1, 2]) * 100 for i in range(700 // 3)] * 3)
    ship = SimpleNamespace(
        value=TrainedModel.from_model(DenseNetwork([300, 2]), DenseNetwork([300, 2]).initial())
    )

    def make(outputs: Any) -> Any:
        seen.append(len(outputs[0]))
        return outputs[0]

    found = list(predict_columns(ship, make, make_read_plan(schema), "here", [column]))
    rows = np.array([list(one) for one in column], np.float32)
    wanted = predict_flattened(ship.value.open(), rows)
    np.testing.assert_array_equal(np.concatenate(found), wanted)
    assert [rows // 8 for rows in seen] == [32, 32, 23]
    assert sum(seen) == len(column)


@pytest.mark.parametrize("output", ["", (), {}, None, ("a", ""), 3])
def test_rejects_output_without_column_name(output: Any) -> None:
    with pytest.raises(UsageError, match="give a column's name"):
        resolve_output_columns(output)


def test_feature_arrays_keep_integers_and_others_become_float32() -> None:
    """Integer features keep their dtype, as embeddings need; lists and doubles become float32."""
    ids = np.array([[1, 2]])
    given: Any = features_to_arrays({"ids": ids, "x": [[1, 2]], "y": np.ones((1, 2))})
    assert [array.dtype for array in given.values()] == [ids.dtype, np.float32, np.float32]
    several: Any = features_to_arrays((ids, ids))
    assert several[0].dtype == ids.dtype
    one: Any = features_to_arrays(np.ones((1, 2), np.uint8))
    assert one.dtype == np.uint8


@pytest.mark.parametrize("dtype", [">u2", ">i4", ">i8", ">f2", ">f4", ">f8"])
def test_big_endian_arrays_become_native_byte_order(dtype: str) -> None:
    """Libraries such as torch take no other byte order; FITS files have arrays in it."""
    values = np.array([[1, 2], [3, 400]], dtype)
    native = np.dtype(np.float32 if values.dtype.kind == "f" else dtype.replace(">", "="))
    for array in (features_to_arrays(values), arrays_to_batch((values, values[:, 0])).features):
        assert isinstance(array, np.ndarray)
        assert (array.dtype, array.dtype.isnative) == (native, True)
        np.testing.assert_array_equal(array, values)
    labels = row_blocks.as_array(values, is_label=True)
    assert labels.dtype.isnative
    np.testing.assert_array_equal(labels, values)


def test_torch_and_jax_tensors_keep_integer_dtype() -> None:
    """Tensors of torch and JAX are read as NumPy arrays are, also if they require gradients."""
    torch, jax_numpy = pytest.importorskip("torch"), pytest.importorskip("jax.numpy")
    big = 2**24 + 1  # float32 rounds it
    given: Any = features_to_arrays((torch.tensor([[big]]), jax_numpy.array([[big]])))
    assert [array.dtype for array in given] == [np.int64, np.int32]
    assert [array.item() for array in given] == [big, big]
    learnt: Any = features_to_arrays(torch.ones((1, 2), requires_grad=True))
    assert learnt.dtype == np.float32
    with pytest.raises(UsageError, match=r"features are <Tensor of .*BFloat16"):
        features_to_arrays(torch.ones((1, 2), dtype=torch.bfloat16))


def test_rejects_features_with_masked_entries() -> None:
    values = np.ma.masked_array(np.ones((2, 2)), [[False, False], [False, True]])
    with pytest.raises(UsageError, match=r"masked entries: fill them, with \.filled\(0\)"):
        features_to_arrays({"x": values})
    assert features_to_arrays(values[:1]).shape == (1, 2)  # this row has no masked entry


def test_merged_metrics_of_parts_equal_metrics_of_all_rows() -> None:
    """Merged metrics of three parts equal the metrics of all rows."""
    model, wanted = (
        make_trained_model().open(),
        MetricSpec(("classification", "roc", "regression", "loss")),
    )
    shares = np.eye(2, dtype=np.float32)[LABELS]
    whole = evaluate_batch(model, wanted, Batch(FEATURES, shares))
    cuts = [slice(30, 50), slice(0, 7), slice(7, 30)]
    parts = merge_evaluations(
        [evaluate_batch(model, wanted, Batch(FEATURES[c], shares[c])) for c in cuts]
    )
    assert (parts.classification.confusion == whole.classification.confusion).all()
    assert parts.regression == whole.regression
    assert parts.roc.auc == whole.roc.auc
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)
    for name in ("rows", "accuracy", "f1 (macro)", "mse", "area under ROC", "loss"):
        assert name in parts.table()


def test_rows_of_weight_zero_do_not_count_in_loss() -> None:
    """Rows of weight 0 do not count in the loss; the loss is NaN if it was not requested."""
    model, weights = make_trained_model().open(), (LABELS == 1).astype(np.float32)
    weighted = evaluate_batch(model, MetricSpec(("loss",)), Batch(FEATURES, LABELS, weights))
    ones = LABELS == 1
    alone = evaluate_batch(model, MetricSpec(("loss",)), Batch(FEATURES[ones], LABELS[ones]))
    assert weighted.loss == pytest.approx(alone.loss, rel=1e-6)
    assert np.isnan(evaluate_batch(model, MetricSpec(("roc",)), Batch(FEATURES, LABELS)).loss)


def test_default_metrics_depend_on_model() -> None:
    """The default metrics depend on the model; the metric loss needs a model with a loss."""
    assert select_metrics(DenseNetwork([2, 2]), None, 1).metrics == ("classification",)
    values = DenseNetwork([2, 1], loss="squared_error")
    assert select_metrics(values, None, 1).metrics == ("regression",)
    with pytest.raises(UsageError, match=r"SimpleNamespace lacks loss\(batch\)"):
        select_metrics(SimpleNamespace(), "loss", 1)  # type: ignore[arg-type]


class CyclicModel(DenseNetwork):
    """A model that refers to itself, as models on JAX do."""

    def bind(self, parameters: Any) -> None:
        super().bind(parameters)
        self.compiled = self.step


def test_frozen_model_evicted_from_cache_is_freed() -> None:
    """A frozen model with a reference cycle is freed when a later model is opened."""
    model = CyclicModel([6, 3], seed=0)
    known = weakref.ref(get_open_model(TrainedModel.from_model(model, model.initial())))
    del model
    gc.freeze()
    for seed in range(1, CACHED_MODELS_MAX + 1):
        get_open_model(make_trained_model(seed))
    assert known() is not None
    get_open_model(make_trained_model(CACHED_MODELS_MAX + 1))
    assert known() is None


def test_opening_models_freezes_garbage_collector_only_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Objects are frozen once; else Spark's collection after each task takes 0.2 s with torch."""
    calls: list[None] = []
    monkeypatch.setattr(gc, "freeze", lambda: calls.append(None))
    monkeypatch.setattr(task_environment, "_modules_frozen", 0)
    for _ in range(2):
        get_open_model(make_trained_model())
    assert len(calls) == 1
