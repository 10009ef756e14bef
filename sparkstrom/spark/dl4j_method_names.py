"""Give SparkNetwork the method names of DL4J's Spark classes.

DL4J (Deeplearning4j) trains networks on Spark with its classes SparkDl4jMultiLayer and
SparkComputationGraph. ``Dl4jMethodNames`` provides those of their methods that are useful here. For
the other methods, an error message names a replacement.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sparkstrom.base.errors import UsageError
from sparkstrom.data.column_selection import ColumnNames, ColumnSpec
from sparkstrom.data.row_blocks import quote_column
from sparkstrom.fit.evaluation import Evaluation
from sparkstrom.options.common import to_snake_case
from sparkstrom.spark.data import partitioning
from sparkstrom.spark.data.column_selection import has_exact_names
from sparkstrom.spark.data.export import (
    NPZ,
    list_minibatch_files,
    read_file_rows,
    to_spark_path,
)

if TYPE_CHECKING:
    from sparkstrom.fit.summary import TrainingSummary
    from sparkstrom.spark.application import Application, Predictor

# Parts of the messages below.
_SEVERAL_COLUMNS = "features=(...), label=(...)"
_WORKERS = "nothing: one model in each Python worker evaluates"
_NO_VAE = "nothing: there are no variational autoencoders; your own model may output its score"
# Methods of SparkDl4jMultiLayer and SparkComputationGraph that do not exist here under their names.
# The values follow the word "use" in an error message.
REPLACEMENTS: dict[str, str] = {
    "evaluate_roc": "evaluate(data, 'roc')",
    "evaluate_roc_multi_class": "evaluate(data, 'roc', positive=k) for each class k",
    "evaluate_regression": "evaluate(data, 'regression')",
    "do_evaluation": "evaluate(data, [...]), which takes several at once",
    "do_evaluation_mds": f"evaluate(data, [...], {_SEVERAL_COLUMNS})",
    "evaluate_mds": f"evaluate(data, {_SEVERAL_COLUMNS})",
    "evaluate_roc_mds": f"evaluate(data, 'roc', {_SEVERAL_COLUMNS})",
    "evaluate_regression_mds": f"evaluate(data, 'regression', {_SEVERAL_COLUMNS})",
    "calculate_score_multi_data_set": f"calculate_score(data, {_SEVERAL_COLUMNS})",
    "score_examples_multi_data_set": f"score_examples(data, {_SEVERAL_COLUMNS})",
    "feed_forward_with_key_single": "predict(features)",
    "feed_forward_with_mask_and_key": "feed_forward_with_key; a model that needs a mask takes it"
    " as one of several features",
    "fit_labeled_point": "fit(rdd.map(lambda p: (p.features.toArray(), p.label)))",
    "fit_continuous_labeled_point": "fit(rdd.map(lambda p: (p.features.toArray(), p.label)))",
    "fit_multi_data_set": f"fit(data, {_SEVERAL_COLUMNS})",
    "fit_paths_multi_data_set": f"fit_paths(paths, {_SEVERAL_COLUMNS})",
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
# The same without underscores in the keys: to_snake_case cannot split evaluateROCMultiClass.
_NORMALIZED_REPLACEMENTS = {name.replace("_", ""): use for name, use in REPLACEMENTS.items()}


class Dl4jMethodNames:
    """A base class of SparkNetwork with methods named as in DL4J.

    Access to any other method of DL4J's classes raises an AttributeError that names a replacement.
    """

    _application: Application
    _context: Any  # the SparkContext, or a Spark Connect session
    _predictor: Predictor

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError. For a DL4J method, the message names a replacement."""
            ours = to_snake_case(name)
            use = _NORMALIZED_REPLACEMENTS.get(
                ours.replace("_", ""), ours if hasattr(type(self), ours) else ""
            )
            hint = f": use {use}" if use else ""
            raise AttributeError(
                f"{type(self).__name__} has no attribute {name!r}{hint}", name=name
            )

    def fit_paths(
        self, paths: str | Sequence[str], epochs: int = 1, **options: Any
    ) -> TrainingSummary:
        """Train on minibatches that were previously written to files.

        Whether rows are redistributed over the workers is decided by the option ``repartition``.

        Args:
            paths: A file, a folder, a glob pattern, or a list of these. Either all files are
                Parquet, with the columns that ``features=`` and ``label=`` name, or all are npz,
                with arrays ``features``, ``labels`` and optionally ``weights``.
            epochs: Number of epochs to train.
            options: Other arguments of ``fit``.

        Returns:
            The summary of the fit.

        Raises:
            UsageError: No files match ``paths``, or they are npz files and the session is one of
                Spark Connect.
        """
        kind, files = list_minibatch_files(paths)
        data: Any
        if kind == NPZ:
            self._application.require_rdds("fit_paths of npz files", "write them as Parquet")
            slices = min(len(files), self._context.defaultParallelism)
            data = self._context.parallelize(files, slices).mapPartitions(read_file_rows)
        else:
            data = self._application.session.read.parquet(*map(to_spark_path, files))
        fit: Any = self.fit  # type: ignore[attr-defined]
        summary: TrainingSummary = fit(data, epochs, **options)
        return summary

    def calculate_score(self, data: Any, average: bool = True, **options: Any) -> float:
        """Return the model's loss on ``data``: the weighted mean over rows, or the weighted sum.

        Args:
            data: Rows in a form that ``fit`` accepts.
            average: True for the mean, False for the sum.
            options: Other arguments of ``evaluate``.
        """
        evaluate: Callable[..., Evaluation] = self.evaluate  # type: ignore[attr-defined]
        evaluation = evaluate(data, "loss", **options)
        assert evaluation.loss is not None, "the metric that was requested"
        assert evaluation.weights is not None, "as there is a loss"
        return evaluation.loss if average else evaluation.loss * float(evaluation.weights)

    def score_examples(
        self,
        data: Any,
        include_regularization: bool = False,
        *,
        features: ColumnNames = "features",
        label: ColumnNames | None = "label",
        output: str = "score",
    ) -> Any:
        """Compute the model's loss for each row of ``data``.

        Args:
            data: Rows in a form that ``fit`` accepts.
            include_regularization: Whether to add the model's penalty to each score.
            features: Feature columns of a DataFrame.
            label: Label columns of a DataFrame.
            output: Name of the column that is added to a DataFrame.

        Returns:
            For an RDD, an RDD of floats in the same order; for a DataFrame, that DataFrame with an
            additional column ``output`` of type double. Row weights are ignored. The score is NaN
            for a label that the loss ignores (``ignore_index``, class weight 0).

        Raises:
            UsageError: The model has no loss, or no penalty.
        """
        return self._predictor.score(
            data, ColumnSpec(features, label), output, penalized=include_regularization
        )

    def feed_forward_with_key(
        self,
        data: Any,
        key: str | Sequence[str] = "key",
        *,
        features: ColumnNames = "features",
        output: str = "prediction",
    ) -> Any:
        """Return the model's outputs, each together with the key of its row.

        Args:
            data: An RDD of (key, features), or a DataFrame.
            key: Key columns of a DataFrame.
            features: Feature columns of a DataFrame.
            output: Name of the output column of a DataFrame.

        Returns:
            An RDD of (key, outputs), or a DataFrame of ``key`` and ``output`` (array<float>).

        Raises:
            UsageError: A named column does not exist, the output has a key column's name, or
                columns of an RDD are named.
        """
        if not partitioning.is_dataframe(data):
            partitioning.check_data(data)
            if key != "key":
                raise UsageError(
                    f"key={key!r}: an RDD has no columns; leave key out, and give an RDD of"
                    " pairs (key, features)"
                )
            return self._predictor.predict_with_keys(data, features, output)
        keys = [key] if isinstance(key, str) else list(key)
        missing = [name for name in keys if name not in data.columns]
        if missing or not keys:
            raise UsageError(
                f"key={key!r}: there is no column {missing}; the DataFrame has {data.columns}"
            )
        exact = has_exact_names(data)
        replaced = [n for n in keys if n == output or (not exact and n.lower() == output.lower())]
        if replaced:
            raise UsageError(
                f"output={output!r}: the outputs would replace the key column {replaced[0]!r}; give"
                " another name for the outputs"
            )
        # The DataFrame may have a column ``output`` already.
        temporary = f"sparkstrom_{secrets.token_hex(8)}"
        predicted = self._predictor.predict(data, features, temporary)
        chosen = predicted.select(*map(quote_column, [*keys, temporary]))
        return chosen.withColumnRenamed(temporary, output)
