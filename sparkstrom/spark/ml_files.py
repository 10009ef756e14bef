"""Files of a saved estimator or model: Spark ML's metadata, and beside it files of our own.

A saved model's directory holds ``metadata`` (Params, as every stage has) and ``model/model.npz``
with its ``model.npz.json``: what ``SparkNetwork.save`` writes, and plain NumPy opens.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReader, MLWriter

from sparkstrom.base.errors import UsageError
from sparkstrom.checkpoint.store import load_model, save_model
from sparkstrom.models.base import Buffered, Exporting, FlatModel
from sparkstrom.models.registry import from_description
from sparkstrom.spark.inference import Trained
from sparkstrom.spark.ml_params import NAMES
from sparkstrom.spark.values import from_json, to_json

FOLDER, NAME = "model", "model.npz"
OURS, COLUMNS = "sparkstrom", "columns"  # our part of the metadata, and names that are no string
VALUES = ("model", "master", "earlyStopping")  # Params that are values, not JSON by themselves


class EstimatorWriter(MLWriter):
    """Writes an estimator: its model is described, not trained."""

    def __init__(self, instance: Any) -> None:
        super().__init__()
        self._instance = instance

    def saveImpl(self, path: str) -> None:
        """Write the metadata. Raise UsageError for an option that cannot be written."""
        estimator = self._instance
        model = estimator.of("model")
        ours = {
            "model": model.describe() if model is not None else None,
            "master": to_json(estimator.of("master")),
            "earlyStopping": to_json(estimator.of("earlyStopping")),
        }
        _save_metadata(estimator, path, self.sc, ours, skip=VALUES)


class EstimatorReader(MLReader[Any]):
    """Reads what ``EstimatorWriter`` wrote."""

    def __init__(self, cls: type[Any]) -> None:
        super().__init__()
        self._cls = cls

    def load(self, path: str) -> Any:
        """The estimator. Raise UsageError for a model whose code was not saved."""
        metadata = DefaultParamsReader.loadMetadata(path, self.sc)
        estimator = self._cls()
        estimator._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(estimator, metadata)
        saved = dict(metadata[OURS])
        described, columns = saved.pop("model"), saved.pop(COLUMNS, {})
        if described is not None:
            estimator.setModel(from_description(described))
        found = {name: from_json(value) for name, value in saved.items() if value is not None}
        return estimator._set(**found, **_names_in(columns))


class ModelWriter(MLWriter):
    """Writes a trained model."""

    def __init__(self, instance: Any) -> None:
        super().__init__()
        self._instance = instance

    def saveImpl(self, path: str) -> None:
        """Write metadata and files, on whatever file system ``path`` is."""
        instance, trained = self._instance, self._instance.trained
        _save_metadata(instance, path, self.sc, {"several": instance.several})
        model = trained.open()
        with tempfile.TemporaryDirectory(prefix="sparkstrom-save-") as folder:
            save_model(
                Path(folder) / NAME,
                model.describe(),
                trained.parameters,
                instance.epochs_trained,
                buffers=model.buffers_bytes() if isinstance(model, Buffered) else b"",
                exported=model.exported() if isinstance(model, Exporting) else None,
            )
            for file in sorted(Path(folder).iterdir()):
                _put(self.sc, file, f"{path}/{FOLDER}/{file.name}")


class ModelReader(MLReader[Any]):
    """Reads what ``ModelWriter`` wrote; ``model(...)`` says of what code, where it must be said."""

    def __init__(self, cls: type[Any]) -> None:
        super().__init__()
        self._cls = cls
        self._model: FlatModel | None = None

    def model(self, model: FlatModel) -> ModelReader:
        """One like the saved one, where its code was not saved, as a TorchModel's is not."""
        self._model = model
        return self

    def load(self, path: str) -> Any:
        """The trained model. Raise UsageError where files are missing or do not fit together."""
        metadata = DefaultParamsReader.loadMetadata(path, self.sc)
        with tempfile.TemporaryDirectory(prefix="sparkstrom-load-") as folder:
            for name in (NAME, f"{NAME}.json"):
                _get(self.sc, f"{path}/{FOLDER}/{name}", Path(folder) / name)
            model, parameters, epochs = load_model(Path(folder) / NAME, self._model)
        several = metadata[OURS].get("several", False)
        instance = self._cls(Trained.of(model, parameters), None, epochs, several=several)
        instance._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(instance, metadata)
        return instance._set(**_names_in(metadata[OURS].get(COLUMNS, {})))


def _save_metadata(
    instance: Any, path: str, context: Any, ours: dict[str, Any], skip: tuple[str, ...] = ()
) -> None:
    """Params as JSON, without those of ``skip``."""
    plain = instance.copy()
    given = {name: plain.getOrDefault(name) for name in NAMES if plain.hasParam(name)}
    several = {name: value for name, value in given.items() if not isinstance(value, str)}
    for name in (*skip, *several):
        plain._paramMap.pop(plain.getParam(name), None)
        plain._defaultParamMap.pop(plain.getParam(name), None)
    columns = {name: [type(value).__name__, value] for name, value in several.items()}
    ours = ours | ({COLUMNS: columns} if columns else {})
    DefaultParamsWriter.saveMetadata(plain, path, context, extraMetadata={OURS: ours})


def _names_in(columns: dict[str, Any]) -> dict[str, Any]:
    """Names as they were given: JSON knows no tuples."""
    return {
        name: tuple(value) if kind == "tuple" else value for name, (kind, value) in columns.items()
    }


def _put(context: Any, source: Path, target: str) -> None:
    """A local file to any file system that Hadoop reaches."""
    system, path, make = _hadoop(context, target)
    system.copyFromLocalFile(False, True, make(source.as_uri()), path)


def _get(context: Any, source: str, target: Path) -> None:
    system, path, make = _hadoop(context, source)
    if not system.exists(path):
        raise UsageError(f"{source} does not exist: this is no directory of a saved model")
    system.copyToLocalFile(False, path, make(target.as_uri()), True)  # True: no checksum beside


def _hadoop(context: Any, name: str) -> tuple[Any, Any, Any]:
    make = context._jvm.org.apache.hadoop.fs.Path
    path = make(name)
    return path.getFileSystem(context._jsc.hadoopConfiguration()), path, make
