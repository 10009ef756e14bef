"""Tests of prediction and evaluation on executors: results equal those of one process.

They do not depend on the partitions.
"""

from __future__ import annotations

import sys
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.errors import PythonException
from pyspark.sql import functions as sql
from sklearn import metrics as sk

from sparkstrom.base.errors import UsageError
from sparkstrom.data.column_selection import ColumnSpec
from sparkstrom.models import DenseNetwork
from sparkstrom.models.output_interpretation import predict_flattened
from sparkstrom.spark.data.column_selection import resolve_columns
from sparkstrom.spark.data.partitioning import create_source


@pytest.fixture(scope="module")
def rows(digits):
    features, labels = digits.held_out
    return [(f.tolist(), int(y)) for f, y in zip(features, labels, strict=True)]


@pytest.fixture(scope="module")
def frame(spark, rows):
    return spark.createDataFrame(rows, "features array<float>, label int").cache()


def test_metrics_do_not_depend_on_partitions(spark, make_network, digits, rows, frame):
    """Metrics are equal for all partitionings and in this process, and agree with scikit-learn."""
    network = make_network()
    features, labels = digits.held_out
    asked = ["classification", "roc", "loss"]
    found = [network.evaluate(frame.repartition(parts), asked, positive=3) for parts in (1, 3)] + [
        network.evaluate(spark.sparkContext.parallelize(rows, 5), asked, positive=3),
        network.evaluate((features, labels), asked, positive=3),
    ]
    first = found[0]
    outputs = predict_flattened(network.model, features)
    assert first.rows == len(labels)
    assert first.classification.accuracy == sk.accuracy_score(labels, outputs.argmax(1))
    assert first.roc.auc == pytest.approx(sk.roc_auc_score(labels == 3, outputs[:, 3]), rel=1e-12)
    shares = outputs.astype(float) / outputs.sum(axis=1, dtype=float)[:, None]
    assert first.loss == pytest.approx(sk.log_loss(labels, shares), rel=1e-5)
    for other in found[1:]:
        assert (other.classification.confusion == first.classification.confusion).all()
        assert other.roc.scores.tobytes() == first.roc.scores.tobytes()
        assert other.roc.auc == first.roc.auc
        assert other.loss == pytest.approx(first.loss, rel=1e-6)


def test_regression_metrics_do_not_depend_on_partitions(spark, make_network, digits):
    """A regression's metrics are equal for all partitionings."""
    network = make_network(DenseNetwork([64, 8, 1], loss="squared_error", seed=2))
    features, labels = digits.held_out
    rows = [(f.tolist(), float(y)) for f, y in zip(features, labels, strict=True)]
    frame = spark.createDataFrame(rows, "features array<float>, label double")
    found = [network.evaluate(frame.repartition(parts)).regression for parts in (1, 4)]
    assert found[0] == found[1]
    outputs = predict_flattened(network.model, features)[:, 0].astype(float)
    assert found[0].r2 == pytest.approx(sk.r2_score(labels, outputs), rel=1e-12)
    assert network.score(frame) == pytest.approx(found[0].mse, rel=1e-6)


def test_predict_on_executors_equals_local_prediction(spark, make_network, digits, frame):
    network = make_network()
    predicted = network.predict(frame.repartition(3), output="shares")
    assert predicted.columns == ["features", "label", "shares"]
    found = predicted.collect()
    wanted = predict_flattened(network.model, np.array([row.features for row in found], np.float32))
    assert np.array([row.shares for row in found], np.float32).tobytes() == wanted.tobytes()
    rdd = spark.sparkContext.parallelize(list(digits.held_out[0]), 3)
    wanted = predict_flattened(network.model, digits.held_out[0])
    assert np.stack(network.predict(rdd).collect()).tobytes() == wanted.tobytes()


def test_udf_equals_local_prediction(spark, make_network, digits, frame):
    network = make_network()
    udf = network.udf()
    found = frame.select("features", udf("features").alias("shares")).collect()
    wanted = predict_flattened(network.model, np.array([row.features for row in found], np.float32))
    assert np.array([row.shares for row in found], np.float32).tobytes() == wanted.tobytes()
    apart = frame.select(*[sql.col("features")[i].alias(f"x{i}") for i in range(64)])
    found = apart.select("*", network.udf(output="p")(*apart.columns).alias("made")).limit(50)
    for row in found.select("made.p", *apart.columns).collect():
        wanted = predict_flattened(network.model, np.array([row[1:]], np.float32))
        assert np.array(row.p, np.float32).tobytes() == wanted.tobytes()


class OnlyFloats(DenseNetwork):
    """A network that takes only float32, like a torch module."""

    def predict(self, features):
        assert features.dtype == np.float32
        return super().predict(features)


@pytest.mark.usefixtures("by_value")
def test_udf_reads_columns_like_training(spark, make_network):
    network = make_network(OnlyFloats([4, 3], seed=1))
    udf, rows = network.udf(), [(i, i + 1, [[float(i), 1.0], [2.0, 3.0]]) for i in range(5)]
    schema = "a int, b short, nested array<array<float>>"
    frame = spark.createDataFrame(rows, schema).coalesce(1)  # a failed task is tried 4 times
    frame = frame.withColumn("place", sql.struct("a", "b"))
    flat = network.udf(shapes=[(4,)])  # in the shape of this network
    made = frame.select("a", "b", udf("a", "b", "a", "b").alias("p"), flat("nested").alias("q"))
    for row in made.collect():
        for found, given in [(row.p, [row.a, row.b] * 2), (row.q, [row.a, 1, 2, 3])]:
            wanted = predict_flattened(network.model, np.array([given], np.float32))
            assert np.array(found, np.float32).tobytes() == wanted.tobytes()
    lost = sql.array(sql.array(sql.lit(1.0), sql.lit(None).cast("double")))
    for wrong, words in [(lost, "column 0 has a null or NaN, in row 0"), ("place", "is a struct")]:
        with pytest.raises(PythonException, match=words):
            frame.select(udf(wrong)).collect()


class TwoInputs(DenseNetwork):
    """A network whose inputs and outputs have names."""

    def predict(self, features):
        outputs = super().predict(np.concatenate([features["a"], features["b"]], axis=1))
        return {"left": outputs[:, :1], "right": outputs[:, 1:]}


def create_frame_of_all_kinds(spark):
    """Return twelve rows with a column of each kind of features; one name has a dot and a space."""
    from pyspark.ml.feature import VectorAssembler
    from pyspark.ml.linalg import SparseVector, VectorUDT

    image = "struct<height:int,width:int,nChannels:int,mode:int,data:binary>"
    schema = (
        "id long, short short, `a.b c` double, price decimal(8,2), flag boolean, x array<double>, "
        f"nested array<array<short>>, raw binary, image {image}, extra string"
    )
    rows = [
        (i, i, i / 4, Decimal(i) / 4, i % 2 == 0, [i / 8, 1.0], [[i, 1], [2, 3]],
         bytearray([i, 255]), (2, 1, 3, 16, bytearray(range(i, i + 6))), "kept")
        for i in range(12)
    ]  # fmt: skip
    vector = sql.udf(lambda i: SparseVector(4, {int(i) % 4: i / 2}), VectorUDT())
    long = sql.udf(lambda i: SparseVector(1 << 16, {int(i): 1.0}), VectorUDT())
    frame = spark.createDataFrame(rows, schema)
    both = frame.withColumn("vector", vector("id")).withColumn("long", long("id"))
    noted = VectorAssembler(inputCols=["short", "id"], outputCol="assembled")  # with its width
    return noted.transform(both).coalesce(1).cache()


@pytest.mark.slow
def test_predict_accepts_all_kinds_of_features_of_fit(spark, make_network):
    """Predictions use the same arrays as training; rows keep their order and other columns."""
    frame = create_frame_of_all_kinds(spark)
    sizes = {"id": 1, "short": 1, "a.b c": 1, "price": 1, "flag": 1, "x": 2, "nested": 4}
    wide = {"raw": 2, "image": 6, "vector": 4, "long": 1 << 16, "assembled": 2}
    many = [*((name, size) for name, size in (sizes | wide).items()), (["short", "price"], 2)]
    given = frame.collect()
    for features, width in many:
        network = make_network(DenseNetwork([width, 2], seed=1))
        blocks = read_training_features(frame, features)
        wanted = predict_flattened(network.model, blocks)
        found = network.predict(frame, features=features).collect()
        assert [row[:-1] for row in found] == [tuple(row) for row in given], features
        assert np.array([row.prediction for row in found], "f4").tobytes() == wanted.tobytes()


def test_short_vector_columns_are_read_as_arrays(spark):
    """Vector columns whose metadata has a small width are read as arrays, which is faster.

    They are arrays of doubles, because the JVM makes infinity of 1e300 as float32.
    """
    frame = create_frame_of_all_kinds(spark)
    for name, array in (("assembled", True), ("vector", False)):
        _, reading = resolve_columns(frame, ColumnSpec(name, ()), dense=True)
        (kind,) = pa.ipc.read_schema(pa.py_buffer(reading.schema)).types
        assert pa.types.is_list(kind) == array, name
        assert not array or kind.value_type == pa.float64()


def read_training_features(frame, features):
    """Return the features that training would read, in the order of the rows."""
    source = create_source(frame.withColumn("zero", sql.lit(0)), ColumnSpec(features, "zero"))
    messages, blocks = source.rdd.collect(), source.blocks
    return np.concatenate([b.form.batch(b.records).features for b in blocks(0, messages)])


@pytest.fixture
def by_value():
    """Pickle this module's classes by value, because executors cannot import it."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.mark.usefixtures("by_value")
def test_predict_supports_several_inputs_and_outputs(spark, make_network):
    network = make_network(TwoInputs([3, 3], seed=1))
    chosen = {"a": "x", "b": ["short"]}
    found = network.predict(
        create_frame_of_all_kinds(spark), features=chosen, output={"right": "r", "left": "l"}
    ).collect()
    x = {"a": np.array([[i / 8, 1] for i in range(12)], "f4"), "b": np.arange(12.0)[:, None]}
    wanted = network.predict(x)
    assert found[0].extra == "kept"
    np.testing.assert_allclose([row.l for row in found], wanted["left"], rtol=1e-5)
    np.testing.assert_allclose([row.r for row in found], wanted["right"], rtol=1e-5)


def test_only_feature_columns_are_sent_to_python(spark, make_network):
    """Spark's plan sends only the model's columns to Python, in a single evaluation."""
    frame = make_network(DenseNetwork([2, 2])).predict(
        create_frame_of_all_kinds(spark), features="x"
    )
    plan = frame.select("prediction")._jdf.queryExecution().executedPlan().toString()
    (line,) = [line for line in plan.splitlines() if "ArrowEvalPython" in line]
    assert "extra" not in line


@pytest.mark.parametrize(
    ("features", "why"),
    [
        ("nowhere", "no column 'nowhere' for features"),
        ("extra", "features column 'extra' is string: it must be an array of numbers"),
        ((), r"features=\(\): give a column's name"),
    ],
)
def test_missing_or_mistyped_features_are_rejected_before_job(spark, make_network, features, why):
    with pytest.raises(UsageError, match=why):
        make_network().predict(create_frame_of_all_kinds(spark), features=features)


def test_ambiguous_feature_column_is_rejected(spark, make_network):
    """An ambiguous name of features is refused; other columns may have ambiguous names."""
    frame = create_frame_of_all_kinds(spark)
    for twice in (frame.select("x", "x"), frame.select("x", sql.col("id").alias("X"))):
        with pytest.raises(
            UsageError, match=r"features column 'x' could be any of \['x', '[xX]'\]"
        ):
            make_network().predict(twice, features="x")
    elsewhere = frame.select("x", "id", "id")
    predicted = make_network(DenseNetwork([2, 2])).predict(elsewhere, features="x")
    assert predicted.columns == ["x", "id", "id", "prediction"]


@pytest.mark.slow
def test_bad_row_error_names_row_and_partition(spark, make_network):
    frame = create_frame_of_all_kinds(spark).selectExpr(
        "if(id = 7, null, x) as x", "if(id = 8, null, vector) v"
    )
    network = make_network(DenseNetwork([2, 2]))
    with pytest.raises(PythonException, match="row 7 of partition 0: column 'x' is null"):
        network.predict(frame, features="x").collect()
    with pytest.raises(PythonException, match="row 8 of partition 0: column 'v' is null"):
        network.predict(frame, features="v").collect()


def test_score_changes_with_replaced_parameters(make_network, frame):
    """The score changes if the network's parameters are replaced."""
    network = make_network()
    before = network.score(frame)
    network.parameters = network.parameters * 2
    assert network.score(frame) != before


def test_invalid_metric_null_row_and_empty_data_are_rejected(make_network, frame):
    network = make_network()
    with pytest.raises(UsageError, match=r"metrics=\['f7'\]: must be among classification"):
        network.evaluate(frame, "f7")
    bad = frame.selectExpr("if(label = 3, null, features) as features", "label").coalesce(1)
    with pytest.raises(UsageError, match=r"row \d+ of partition 0: column 'features' is null"):
        network.evaluate(bad)
    with pytest.raises(UsageError, match="no rows to evaluate"):
        network.evaluate(frame.filter("label > 99"))
