"""Prediction and evaluation on executors: the same bits as in one process, however rows lie."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn import metrics as sk

from sparkstrom.base.errors import UsageError
from sparkstrom.models import DenseNetwork
from sparkstrom.models.outputs import predict_in_blocks


@pytest.fixture(scope="module")
def rows(digits):
    features, labels = digits.held_out
    return [(f.tolist(), int(y)) for f, y in zip(features, labels, strict=True)]


@pytest.fixture(scope="module")
def frame(spark, rows):
    return spark.createDataFrame(rows, "features array<float>, label int").cache()


def test_no_figure_depends_on_the_partitions(spark, make_network, digits, rows, frame):
    network = make_network()
    features, labels = digits.held_out
    asked = ["classification", "roc", "loss"]
    found = [network.evaluate(frame.repartition(parts), asked, positive=3) for parts in (1, 3)] + [
        network.evaluate(spark.sparkContext.parallelize(rows, 5), asked, positive=3),
        network.evaluate((features, labels), asked, positive=3),
    ]
    first = found[0]
    outputs = predict_in_blocks(network.model, features)
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


def test_a_regression_is_measured_to_the_last_bit(spark, make_network, digits):
    network = make_network(DenseNetwork([64, 8, 1], loss="squared_error", seed=2))
    features, labels = digits.held_out
    rows = [(f.tolist(), float(y)) for f, y in zip(features, labels, strict=True)]
    frame = spark.createDataFrame(rows, "features array<float>, label double")
    found = [network.evaluate(frame.repartition(parts)).regression for parts in (1, 4)]
    assert found[0] == found[1]
    outputs = predict_in_blocks(network.model, features)[:, 0].astype(float)
    assert found[0].r2 == pytest.approx(sk.r2_score(labels, outputs), rel=1e-12)
    assert network.score(frame) == pytest.approx(found[0].mse, rel=1e-6)


def test_a_dataframe_gets_its_predictions(spark, make_network, digits, frame):
    network = make_network()
    predicted = network.predict(frame.repartition(3), output="shares")
    assert predicted.columns == ["features", "label", "shares"]
    found = predicted.collect()
    wanted = predict_in_blocks(network.model, np.array([row.features for row in found], np.float32))
    assert np.array([row.shares for row in found], np.float32).tobytes() == wanted.tobytes()
    rdd = spark.sparkContext.parallelize(list(digits.held_out[0]), 3)
    wanted = predict_in_blocks(network.model, digits.held_out[0])
    assert np.stack(network.predict(rdd).collect()).tobytes() == wanted.tobytes()


def test_other_parameters_are_another_broadcast(make_network, frame):
    network = make_network()
    before = network.score(frame)
    network.parameters = network.parameters * 2
    assert network.score(frame) != before


def test_what_cannot_be_measured_is_refused_by_name(make_network, frame):
    network = make_network()
    with pytest.raises(UsageError, match=r"metrics=\['f7'\]: must be among classification"):
        network.evaluate(frame, "f7")
    with pytest.raises(UsageError, match="no rows to evaluate"):
        network.evaluate(frame.filter("label > 99"))
