"""DL4J's Spark layer by its names, in Java's spelling: each that is not here says what to use."""

from __future__ import annotations

import pytest

from sparkstrom.spark.driver.spark_layer_names import SparkLayerNames

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
def test_a_name_of_dl4js_says_what_to_use(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"no attribute '{name}': use {HERE.get(name, '')}"):
        getattr(SparkLayerNames(), name)


def test_other_names_are_refused_without_advice() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'evaluateRocs'$"):
        SparkLayerNames().evaluateRocs  # noqa: B018
