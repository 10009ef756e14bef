"""Asynchronous data-parallel training on Spark executors by gradient sharing over Aeron.

Workers exchange compressed updates over Aeron, a messaging library that uses UDP. Public names are
imported lazily: ``import sparkstrom`` starts no JVM, compiles no kernel and opens no socket.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

# Imported now because it keeps the working directory, which a notebook may change later.
import sparkstrom.base.child_processes  # noqa: F401
from sparkstrom.base.version import __version__

if TYPE_CHECKING:
    from sparkstrom.base import errors as errors
    from sparkstrom.base.errors import SetupError as SetupError
    from sparkstrom.base.errors import SparkstromError as SparkstromError
    from sparkstrom.base.errors import TrainingError as TrainingError
    from sparkstrom.base.errors import UsageError as UsageError
    from sparkstrom.encoding.residual import ResidualClipping as ResidualClipping
    from sparkstrom.encoding.tau import WarmUp as WarmUp
    from sparkstrom.encoding.thresholds import AdaptiveThreshold as AdaptiveThreshold
    from sparkstrom.encoding.thresholds import AutoThreshold as AutoThreshold
    from sparkstrom.encoding.thresholds import FixedThreshold as FixedThreshold
    from sparkstrom.encoding.thresholds import TargetSparsityThreshold as TargetSparsityThreshold
    from sparkstrom.local.parallel_wrapper import ParallelWrapper as ParallelWrapper
    from sparkstrom.local.wrapper_options import TrainingMode as TrainingMode
    from sparkstrom.observe.early_stopping import (
        BestScoreEpochTerminationCondition as BestScoreEpochTerminationCondition,
    )
    from sparkstrom.observe.early_stopping import EarlyStopping as EarlyStopping
    from sparkstrom.observe.early_stopping import (
        InvalidScoreIterationTerminationCondition as InvalidScoreIterationTerminationCondition,
    )
    from sparkstrom.observe.early_stopping import (
        MaxEpochsTerminationCondition as MaxEpochsTerminationCondition,
    )
    from sparkstrom.observe.early_stopping import (
        MaxScoreIterationTerminationCondition as MaxScoreIterationTerminationCondition,
    )
    from sparkstrom.observe.early_stopping import (
        MaxTimeIterationTerminationCondition as MaxTimeIterationTerminationCondition,
    )
    from sparkstrom.observe.early_stopping import (
        ScoreImprovementEpochTerminationCondition as ScoreImprovementEpochTerminationCondition,
    )
    from sparkstrom.options.gradient_sharing import SharedTrainingMaster as SharedTrainingMaster
    from sparkstrom.options.network import VoidConfiguration as VoidConfiguration
    from sparkstrom.options.parameter_averaging import (
        ParameterAveragingTrainingMaster as ParameterAveragingTrainingMaster,
    )
    from sparkstrom.serving import InferenceMode as InferenceMode
    from sparkstrom.serving import ParallelInference as ParallelInference
    from sparkstrom.spark.network import SparkNetwork as SparkNetwork

# Silent until the program configures logging.
logging.getLogger(__name__).addHandler(logging.NullHandler())

_MODULE_BY_NAME = {
    "ScoreImprovementEpochTerminationCondition": "sparkstrom.observe.early_stopping",
    "MaxTimeIterationTerminationCondition": "sparkstrom.observe.early_stopping",
    "MaxScoreIterationTerminationCondition": "sparkstrom.observe.early_stopping",
    "MaxEpochsTerminationCondition": "sparkstrom.observe.early_stopping",
    "InvalidScoreIterationTerminationCondition": "sparkstrom.observe.early_stopping",
    "BestScoreEpochTerminationCondition": "sparkstrom.observe.early_stopping",
    "AdaptiveThreshold": "sparkstrom.encoding.thresholds",
    "AutoThreshold": "sparkstrom.encoding.thresholds",
    "EarlyStopping": "sparkstrom.observe.early_stopping",
    "FixedThreshold": "sparkstrom.encoding.thresholds",
    "InferenceMode": "sparkstrom.serving",
    "ParallelInference": "sparkstrom.serving",
    "ParallelWrapper": "sparkstrom.local.parallel_wrapper",
    "ParameterAveragingTrainingMaster": "sparkstrom.options.parameter_averaging",
    "ResidualClipping": "sparkstrom.encoding.residual",
    "SetupError": "sparkstrom.base.errors",
    "SharedTrainingMaster": "sparkstrom.options.gradient_sharing",
    "SparkNetwork": "sparkstrom.spark.network",
    "SparkstromError": "sparkstrom.base.errors",
    "TargetSparsityThreshold": "sparkstrom.encoding.thresholds",
    "TrainingError": "sparkstrom.base.errors",
    "TrainingMode": "sparkstrom.local.wrapper_options",
    "UsageError": "sparkstrom.base.errors",
    "VoidConfiguration": "sparkstrom.options.network",
    "WarmUp": "sparkstrom.encoding.tau",
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
    """Import and return a public name. Raise AttributeError for any other name.

    For ``SparkNetwork``, warn if this machine has no Aeron library.
    """
    if name == "errors":
        return importlib.import_module("sparkstrom.base.errors")
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module 'sparkstrom' has no attribute {name!r}")
    if name == "SparkNetwork":  # warn before Spark has started and read data
        importlib.import_module("sparkstrom.transport.aeron.library").warn_if_library_missing(2)
    return getattr(importlib.import_module(_MODULE_BY_NAME[name]), name)


def __dir__() -> list[str]:
    """Return the public names, without importing them."""
    return sorted(__all__)
