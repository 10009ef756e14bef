"""Asynchronous data-parallel training on Spark executors, by gradient sharing over Aeron.

The names below are loaded when first used: ``import sparkstrom`` starts no JVM, compiles no
kernel and opens no socket.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from sparkstrom.base.version import __version__

if TYPE_CHECKING:
    from sparkstrom.base import errors as errors
    from sparkstrom.base.errors import SetupError as SetupError
    from sparkstrom.base.errors import SparkstromError as SparkstromError
    from sparkstrom.base.errors import TrainingError as TrainingError
    from sparkstrom.base.errors import UsageError as UsageError
    from sparkstrom.encoding.residuals import ResidualClipping as ResidualClipping
    from sparkstrom.encoding.schedules import WarmUp as WarmUp
    from sparkstrom.encoding.thresholds import AdaptiveThreshold as AdaptiveThreshold
    from sparkstrom.encoding.thresholds import AutoThreshold as AutoThreshold
    from sparkstrom.encoding.thresholds import FixedThreshold as FixedThreshold
    from sparkstrom.encoding.thresholds import TargetSparsityThreshold as TargetSparsityThreshold
    from sparkstrom.local.parallel_wrapper import ParallelWrapper as ParallelWrapper
    from sparkstrom.local.wrapper_options import TrainingMode as TrainingMode
    from sparkstrom.observe.stopping import EarlyStopping as EarlyStopping
    from sparkstrom.observe.termination import (
        BestScoreEpochTerminationCondition as BestScoreEpochTerminationCondition,
    )
    from sparkstrom.observe.termination import (
        InvalidScoreIterationTerminationCondition as InvalidScoreIterationTerminationCondition,
    )
    from sparkstrom.observe.termination import (
        MaxEpochsTerminationCondition as MaxEpochsTerminationCondition,
    )
    from sparkstrom.observe.termination import (
        MaxScoreIterationTerminationCondition as MaxScoreIterationTerminationCondition,
    )
    from sparkstrom.observe.termination import (
        MaxTimeIterationTerminationCondition as MaxTimeIterationTerminationCondition,
    )
    from sparkstrom.observe.termination import (
        ScoreImprovementEpochTerminationCondition as ScoreImprovementEpochTerminationCondition,
    )
    from sparkstrom.serving.parallel_inference import InferenceMode as InferenceMode
    from sparkstrom.serving.parallel_inference import ParallelInference as ParallelInference
    from sparkstrom.spark.driver.averaging_master import (
        ParameterAveragingTrainingMaster as ParameterAveragingTrainingMaster,
    )
    from sparkstrom.spark.driver.discovery import VoidConfiguration as VoidConfiguration
    from sparkstrom.spark.driver.network import SparkNetwork as SparkNetwork
    from sparkstrom.spark.driver.training_master import SharedTrainingMaster as SharedTrainingMaster

logging.getLogger(__name__).addHandler(logging.NullHandler())  # who wants our records says so

_HOMES = {
    "ScoreImprovementEpochTerminationCondition": "sparkstrom.observe.termination",
    "MaxTimeIterationTerminationCondition": "sparkstrom.observe.termination",
    "MaxScoreIterationTerminationCondition": "sparkstrom.observe.termination",
    "MaxEpochsTerminationCondition": "sparkstrom.observe.termination",
    "InvalidScoreIterationTerminationCondition": "sparkstrom.observe.termination",
    "BestScoreEpochTerminationCondition": "sparkstrom.observe.termination",
    "AdaptiveThreshold": "sparkstrom.encoding.thresholds",
    "AutoThreshold": "sparkstrom.encoding.thresholds",
    "EarlyStopping": "sparkstrom.observe.stopping",
    "FixedThreshold": "sparkstrom.encoding.thresholds",
    "InferenceMode": "sparkstrom.serving.parallel_inference",
    "ParallelInference": "sparkstrom.serving.parallel_inference",
    "ParallelWrapper": "sparkstrom.local.parallel_wrapper",
    "ParameterAveragingTrainingMaster": "sparkstrom.spark.driver.averaging_master",
    "ResidualClipping": "sparkstrom.encoding.residuals",
    "SetupError": "sparkstrom.base.errors",
    "SharedTrainingMaster": "sparkstrom.spark.driver.training_master",
    "SparkNetwork": "sparkstrom.spark.driver.network",
    "SparkstromError": "sparkstrom.base.errors",
    "TargetSparsityThreshold": "sparkstrom.encoding.thresholds",
    "TrainingError": "sparkstrom.base.errors",
    "TrainingMode": "sparkstrom.local.wrapper_options",
    "UsageError": "sparkstrom.base.errors",
    "VoidConfiguration": "sparkstrom.spark.driver.discovery",
    "WarmUp": "sparkstrom.encoding.schedules",
}

__all__ = [
    "AdaptiveThreshold",
    "AutoThreshold",
    "BestScoreEpochTerminationCondition",
    "EarlyStopping",
    "FixedThreshold",
    "InferenceMode",
    "InvalidScoreIterationTerminationCondition",
    "MaxEpochsTerminationCondition",
    "MaxScoreIterationTerminationCondition",
    "MaxTimeIterationTerminationCondition",
    "ParallelInference",
    "ParallelWrapper",
    "ParameterAveragingTrainingMaster",
    "ResidualClipping",
    "ScoreImprovementEpochTerminationCondition",
    "SetupError",
    "SharedTrainingMaster",
    "SparkNetwork",
    "SparkstromError",
    "TargetSparsityThreshold",
    "TrainingError",
    "TrainingMode",
    "UsageError",
    "VoidConfiguration",
    "WarmUp",
    "__version__",
    "errors",
]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("sparkstrom.base.errors")
    if name not in _HOMES:
        raise AttributeError(f"module 'sparkstrom' has no attribute {name!r}")
    if name == "SparkNetwork":  # at once, not after Spark's start and the reading of data
        importlib.import_module("sparkstrom.transport.aeron.library").warn_where_absent(2)
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
