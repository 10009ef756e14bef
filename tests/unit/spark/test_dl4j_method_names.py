"""Tests of DL4J's method names: each that SparkNetwork lacks is refused with its replacement."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.models import DenseNetwork
from sparkstrom.spark.application import Predictor
from sparkstrom.spark.dl4j_method_names import Dl4jMethodNames

# Public methods of SparkDl4jMultiLayer and SparkComputationGraph that SparkNetwork does not have.
THERE = [
    "evaluateROC",
    "evaluateROCMDS",
    "evaluateROCMultiClass",
    "evaluateRegression",
    "evaluateRegressionMDS",
    "evaluateMDS",
    "doEvaluation",
    "doEvaluationMDS",
    "calculateScoreMultiDataSet",
    "scoreExamplesMultiDataSet",
    "feedForwardWithKeySingle",
    "feedForwardWithMaskAndKey",
    "fitLabeledPoint",
    "fitContinuousLabeledPoint",
    "fitMultiDataSet",
    "fitPathsMultiDataSet",
    "getNetwork",
    "setNetwork",
    "getScore",
    "setScore",
    "getSparkContext",
    "getTrainingMaster",
    "getSparkTrainingStats",
    "setCollectTrainingStats",
    "setListeners",
    "getDefaultEvaluationWorkers",
    "setDefaultEvaluationWorkers",
    "vaeReconstructionProbabilityWithKey",
    "vaeReconstructionErrorWithKey",
]
HERE = {
    "fitPaths": "fit_paths",
    "calculateScore": "calculate_score",
    "scoreExamples": "score_examples",
    "feedForwardWithKey": "feed_forward_with_key",
}


@pytest.mark.parametrize("name", [*THERE, *HERE])
def test_dl4j_method_name_error_names_replacement(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"no attribute '{name}': use {HERE.get(name, '')}"):
        getattr(Dl4jMethodNames(), name)


def test_other_missing_attribute_error_has_no_advice() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'evaluateRocs'$"):
        Dl4jMethodNames().evaluateRocs  # noqa: B018


class ShuffledRdd:
    """A fake RDD of pairs whose rows come in another order each time it is computed."""

    def __init__(self, pairs: list[Any], run: Any = lambda index, rows: rows) -> None:
        self.pairs, self._run = pairs, run

    def mapPartitionsWithIndex(self, run: Any) -> ShuffledRdd:
        return ShuffledRdd(self.pairs, lambda index, rows: run(index, self._run(index, rows)))

    def mapPartitions(self, run: Any) -> ShuffledRdd:
        return self.mapPartitionsWithIndex(lambda index, rows: run(rows))

    def keys(self) -> ShuffledRdd:
        return self.mapPartitions(lambda rows: (key for key, _ in rows))

    def values(self) -> ShuffledRdd:
        return self.mapPartitions(lambda rows: (value for _, value in rows))

    def zip(self, other: ShuffledRdd) -> Any:
        return SimpleNamespace(collect=lambda: list(zip(self.collect(), other.collect())))  # noqa: B905

    def collect(self) -> list[Any]:
        self.pairs.reverse()
        return list(self._run(0, iter(self.pairs)))


class PredictingNetwork(Dl4jMethodNames):
    """A network that consists of DL4J's methods and a predictor."""

    def __init__(self, model: DenseNetwork) -> None:
        theta = model.initial()
        application: Any = SimpleNamespace(
            is_stopped=False, broadcast_value=lambda value: SimpleNamespace(value=value)
        )
        self._predictor = Predictor(application, lambda: (model, theta))


def test_outputs_match_keys_in_any_row_order() -> None:
    """Keys match outputs even if an RDD's rows come in another order when it is recomputed."""
    model = DenseNetwork([3, 2], seed=1)
    model.bind(model.initial())
    rows = np.arange(300, dtype=np.float32).reshape(100, 3)
    pairs = ShuffledRdd([(f"k{i}", row) for i, row in enumerate(rows)])
    found = dict(PredictingNetwork(model).feed_forward_with_key(pairs).collect())
    assert len(found) == 100
    np.testing.assert_allclose(
        [found[f"k{i}"] for i in range(100)], model.predict(rows), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("named", [{"key": "id"}, {"features": ["a", "b"]}, {"output": "p"}])
def test_column_names_for_rdd_are_refused(named: dict[str, Any]) -> None:
    """Before, they were ignored, and an RDD's elements were read by position."""
    with pytest.raises(UsageError, match=r"leave \w+ out"):
        PredictingNetwork(DenseNetwork([3, 2])).feed_forward_with_key(ShuffledRdd([]), **named)


def test_row_that_is_no_key_pair_is_refused() -> None:
    """A row that is not a pair of key and features is refused by row and partition."""
    model = DenseNetwork([3, 2], seed=1)
    keyed = PredictingNetwork(model).feed_forward_with_key(
        ShuffledRdd([("a", [1.0, 2.0, 3.0]), "abc"])
    )
    with pytest.raises(UsageError, match=r"row 0 of partition 0 is 'abc': .* \(key, features\)"):
        keyed.collect()


class Table:
    """A fake DataFrame in which Spark does not distinguish upper and lower case."""

    mapInArrow = None

    def __init__(self, *columns: str) -> None:
        self.columns = list(columns)
        self.sparkSession = SimpleNamespace(conf=SimpleNamespace(get=lambda *_: "false"))

    def select(self, *columns: str) -> Table:
        return Table(*columns)

    def withColumnRenamed(self, old: str, new: str) -> list[str]:
        return [new if name == old else name for name in self.columns]


def select_keyed_columns(monkeypatch: pytest.MonkeyPatch, key: str | list[str], output: str) -> Any:
    """Return the columns that feed_forward_with_key selects from a fake table."""

    def predict(self: Any, data: Table, features: Any, output: str) -> Table:
        assert output not in data.columns
        return Table(*data.columns, output)

    monkeypatch.setattr(Predictor, "predict", predict)
    table: Any = Table("id", "a.b", "Prediction", "features")
    return PredictingNetwork(DenseNetwork([3, 2])).feed_forward_with_key(table, key, output=output)


@pytest.mark.parametrize(
    ("key", "output", "lost"),
    [("id", "id", "id"), (["id", "Prediction"], "prediction", "Prediction")],
)
def test_output_column_that_replaces_key_is_refused(
    monkeypatch: pytest.MonkeyPatch, key: str | list[str], output: str, lost: str
) -> None:
    """An output column that would replace a key column is refused."""
    with pytest.raises(UsageError, match=f"output='{output}': .* replace the key column '{lost}'"):
        select_keyed_columns(monkeypatch, key, output)


def test_a_key_column_may_have_a_dot_in_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select_keyed_columns(monkeypatch, ["id", "a.b"], "prediction") == [
        "id",
        "`a.b`",
        "prediction",
    ]


class PathReadingNetwork(Dl4jMethodNames):
    """A fake network over Spark Connect."""

    def __init__(self) -> None:
        reader = SimpleNamespace(parquet=lambda *files: ("rows of", *files))
        self._application = SimpleNamespace(session=SimpleNamespace(read=reader))

    def fit(self, data: Any, epochs: int) -> Any:
        return data, epochs


def test_parquet_files_are_read_by_the_networks_session(tmp_path: Path) -> None:
    """Parquet files are read by the network's session, the only one of a Spark Connect client."""
    (tmp_path / "rows.parquet").touch()
    files = f"file://{tmp_path}/rows.parquet"  # a path alone could be one of HDFS
    assert PathReadingNetwork().fit_paths(str(tmp_path), 3) == (("rows of", files), 3)


def test_wildcards_in_the_names_of_files_are_escaped_for_spark(tmp_path: Path) -> None:
    """Spark would read rows1.parquet instead of rows[1].parquet."""
    (tmp_path / "rows[1].parquet").touch()
    files = rf"file://{tmp_path}/rows\[1\].parquet"
    assert PathReadingNetwork().fit_paths(str(tmp_path), 3) == (("rows of", files), 3)
