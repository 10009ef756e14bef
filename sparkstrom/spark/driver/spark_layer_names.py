"""DL4J's Spark layer by its names: what is done here under them, and which name does the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sparkstrom.base.errors import UsageError
from sparkstrom.spark.data import partitioning as spreading
from sparkstrom.spark.data.columns import Chosen, Names
from sparkstrom.spark.data.written_batches import NPZ, files_of, rows_of_files
from sparkstrom.spark.driver.options import snake_case

if TYPE_CHECKING:
    from sparkstrom.spark.driver.application import Application
    from sparkstrom.spark.driver.predictor import Predictor
    from sparkstrom.spark.driver.summary import TrainingSummary

_SEVERAL = "features=(...), label=(...)"
_WORKERS = "nothing: one model in each Python worker evaluates"
_NO_VAE = "nothing: there are no variational autoencoders; a model of yours may put out its score"
# Methods of SparkDl4jMultiLayer and SparkComputationGraph that have another name here.
ELSEWHERE: dict[str, str] = {
    "evaluate_roc": "evaluate(data, 'roc')",
    "evaluate_roc_multi_class": "evaluate(data, 'roc', positive=k) for each class k",
    "evaluate_regression": "evaluate(data, 'regression')",
    "do_evaluation": "evaluate(data, [...]), which takes several at once",
    "do_evaluation_mds": f"evaluate(data, [...], {_SEVERAL})",
    "evaluate_mds": f"evaluate(data, {_SEVERAL})",
    "evaluate_roc_mds": f"evaluate(data, 'roc', {_SEVERAL})",
    "evaluate_regression_mds": f"evaluate(data, 'regression', {_SEVERAL})",
    "calculate_score_multi_data_set": f"calculate_score(data, {_SEVERAL})",
    "score_examples_multi_data_set": f"score_examples(data, {_SEVERAL})",
    "feed_forward_with_key_single": "predict(features)",
    "feed_forward_with_mask_and_key": "feed_forward_with_key; a model that needs a mask takes it"
    " as one of several features",
    "fit_labeled_point": "fit(rdd.map(lambda p: (p.features.toArray(), p.label)))",
    "fit_continuous_labeled_point": "fit(rdd.map(lambda p: (p.features.toArray(), p.label)))",
    "fit_multi_data_set": f"fit(data, {_SEVERAL})",
    "fit_paths_multi_data_set": f"fit_paths(paths, {_SEVERAL})",
    "get_network": "network.model, or network.parameters",
    "set_network": "network.parameters = ...",
    "get_score": "score(data), or summary.history",
    "set_score": "nothing: a summary keeps the scores of its fit",
    "get_spark_context": "the session that you made it with",
    "get_training_master": "the master that you made it with",
    "get_spark_training_stats": "collect_training_stats=True, and the fit's summary",
    "set_collect_training_stats": "SharedTrainingMaster(collect_training_stats=True)",
    "set_listeners": "fit(data, listeners=[...])",
    "get_default_evaluation_workers": _WORKERS,
    "set_default_evaluation_workers": _WORKERS,
    "vae_reconstruction_probability_with_key": _NO_VAE,
    "vae_reconstruction_error_with_key": _NO_VAE,
    "delete_temp_files": "network.close()",
}
# evaluateROCMultiClass, too, in which no rule finds the words.
_FLAT = {name.replace("_", ""): use for name, use in ELSEWHERE.items()}


class SparkLayerNames:
    """Of a SparkNetwork; an attribute that only DL4J has is refused, naming ours."""

    _application: Application
    _context: Any
    _predictor: Predictor

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            ours = snake_case(name)
            use = _FLAT.get(ours.replace("_", ""), ours if hasattr(type(self), ours) else "")
            hint = f": use {use}" if use else ""
            raise AttributeError(
                f"{type(self).__name__} has no attribute {name!r}{hint}", name=name
            )

    def fit_paths(
        self, paths: str | Sequence[str], epochs: int = 1, **options: Any
    ) -> TrainingSummary:
        """Train on minibatches that were written before, as ``fit`` does on data.

        ``paths``: a file, a folder, a pattern, or a list of these; all Parquet, whose columns
        ``features=`` and ``label=`` name, or all npz with arrays ``features``, ``labels`` and, if
        rows weigh differently, ``weights``. Rows are dealt out anew. ``options`` are those of
        ``fit``. Raises UsageError where there are no such files.
        """
        kind, files = files_of(paths)
        data: Any
        if kind == NPZ:
            self._application.need_rdds("fit_paths of npz files", "write them as Parquet")
            slices = min(len(files), self._context.defaultParallelism)
            data = self._context.parallelize(files, slices).mapPartitions(rows_of_files)
        else:
            from pyspark.sql import SparkSession

            data = SparkSession.builder.getOrCreate().read.parquet(*files)
        fit: Any = self.fit  # type: ignore[attr-defined]
        summary: TrainingSummary = fit(data, epochs, **options)
        return summary

    def calculate_score(self, data: Any, average: bool = True, **options: Any) -> float:
        """The model's own loss on ``data``: the mean over rows, or the sum with average=False.

        ``options`` are those of ``score``.
        """
        evaluate: Any = self.evaluate  # type: ignore[attr-defined]
        found = evaluate(data, "loss", **options)
        weight = float(found.weights.exact)
        return float(found.loss if average else found.loss * weight)

    def score_examples(
        self,
        data: Any,
        include_regularization: bool = False,
        *,
        features: Names = "features",
        label: Names | None = "label",
        output: str = "score",
    ) -> Any:
        """The model's loss of each row of ``data``, as ``fit`` takes it: smaller fits better.

        Of an RDD an RDD of float, in the same order; of a DataFrame the same with one more column
        ``output``, double. ``include_regularization`` adds the model's penalty to each. Weights
        of rows do not count. Raises UsageError for a model without a loss, or without a penalty.
        """
        return self._predictor.score(
            data, Chosen(features, label), output, penalized=include_regularization
        )

    def feed_forward_with_key(
        self,
        data: Any,
        key: str | Sequence[str] = "key",
        *,
        features: Names = "features",
        output: str = "prediction",
    ) -> Any:
        """Outputs beside keys: of an RDD of (key, features) an RDD of (key, outputs).

        Of a DataFrame its ``key`` columns and one column ``output``, array<float>. Raises
        UsageError naming a column that is not there.
        """
        if not spreading.is_dataframe(data):
            spreading.check_data(data)
            return self._predictor.predict_with_keys(data)
        keys = [key] if isinstance(key, str) else list(key)
        missing = [name for name in keys if name not in data.columns]
        if missing or not keys:
            raise UsageError(
                f"key={key!r}: there is no column {missing}; the DataFrame has {data.columns}"
            )
        predicted = self._predictor.predict(data, features, output)
        return predicted.select(*keys, output)
