"""Inference without Spark: one opened model per digest, columns to features, parts to figures."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.models import DenseNetwork
from sparkstrom.models.base import Batch
from sparkstrom.models.outputs import predict_in_blocks
from sparkstrom.spark import inference
from sparkstrom.spark.evaluation import Wanted, evaluate_batch, merged, wanted_for
from sparkstrom.spark.inference import (
    MODELS_MAX,
    Trained,
    features_of,
    opened,
    plain,
    predict_rows,
    predict_series,
)

random = np.random.default_rng(4)
FEATURES = random.normal(size=(50, 3)).astype(np.float32)
LABELS = random.integers(0, 2, 50)


@pytest.fixture(autouse=True)
def nothing_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "_opened", type(inference._opened)())


def trained(seed: int = 1) -> Trained:
    model = DenseNetwork([3, 4, 2], seed=seed)
    return Trained.of(model, model.initial())


def shipped(one: Trained) -> Any:
    return SimpleNamespace(value=pickle.loads(pickle.dumps(one)))


def test_a_process_opens_the_same_model_once() -> None:
    first = opened(shipped(trained()).value)
    assert opened(shipped(trained()).value) is first
    assert opened(shipped(trained(2)).value) is not first
    assert len(inference._opened) == 2


def test_it_keeps_the_few_that_were_used_last() -> None:
    first = opened(trained(0))
    for seed in range(1, MODELS_MAX + 1):
        opened(trained(seed))
    assert len(inference._opened) == MODELS_MAX
    assert opened(trained(0)) is not first


def test_other_parameters_or_another_architecture_have_another_digest() -> None:
    one = trained()
    moved = Trained.of(one.model, one.parameters + np.float32(1))
    other = Trained.of(DenseNetwork([3, 4, 2], hidden="tanh", seed=1), one.parameters)
    assert len({one.digest, moved.digest, other.digest}) == 3


def test_rows_and_columns_give_the_same_outputs() -> None:
    wanted = predict_in_blocks(trained().open(), FEATURES)
    by_rows = list(predict_rows(shipped(trained()), FEATURES))
    column = pd.Series([row.tolist() for row in FEATURES])
    cut = iter([column[:20], column[:0], column[20:]])
    by_column = [one for part in predict_series(shipped(trained()), plain, cut) for one in part]
    np.testing.assert_array_equal(by_rows, wanted)
    np.testing.assert_array_equal(by_column, wanted)


@pytest.mark.parametrize("bad", [None, [1.0], [1.0] * 4])
def test_a_row_that_does_not_fit_is_named(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"row 1 of this batch has features .*row 0 has 3 values"):
        features_of(pd.Series([[1.0, 2.0, 3.0], bad]))


def test_parts_give_the_figures_of_the_whole() -> None:
    model, wanted = trained().open(), Wanted(("classification", "roc", "regression", "loss"))
    shares = np.eye(2, dtype=np.float32)[LABELS]
    whole = evaluate_batch(model, wanted, Batch(FEATURES, shares))
    cuts = [slice(30, 50), slice(0, 7), slice(7, 30)]
    parts = merged([evaluate_batch(model, wanted, Batch(FEATURES[c], shares[c])) for c in cuts])
    assert (parts.classification.confusion == whole.classification.confusion).all()
    assert parts.regression == whole.regression
    assert parts.roc.auc == whole.roc.auc
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)
    for name in ("rows", "accuracy", "f1 (macro)", "mse", "area under ROC", "loss"):
        assert name in parts.table()


def test_weights_count_in_the_loss() -> None:
    model, weights = trained().open(), (LABELS == 1).astype(np.float32)
    weighted = evaluate_batch(model, Wanted(("loss",)), Batch(FEATURES, LABELS, weights))
    ones = LABELS == 1
    alone = evaluate_batch(model, Wanted(("loss",)), Batch(FEATURES[ones], LABELS[ones]))
    assert weighted.loss == pytest.approx(alone.loss, rel=1e-6)
    assert np.isnan(evaluate_batch(model, Wanted(("roc",)), Batch(FEATURES, LABELS)).loss)


def test_what_is_measured_fits_the_model() -> None:
    assert wanted_for(DenseNetwork([2, 2]), None, 1).metrics == ("classification",)
    values = DenseNetwork([2, 1], loss="squared_error")
    assert wanted_for(values, None, 1).metrics == ("regression",)
    with pytest.raises(UsageError, match=r"SimpleNamespace has no loss\(batch\)"):
        wanted_for(SimpleNamespace(), "loss", 1)  # type: ignore[arg-type]
