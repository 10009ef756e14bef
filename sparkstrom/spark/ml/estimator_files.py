"""Files of a saved estimator or model: Spark ML's metadata, and beside it files of our own.

A saved model's directory holds ``metadata`` (Params, as every stage has) and ``model/model.npz``
with its ``model.npz.json``: what ``SparkNetwork.save`` writes, and plain NumPy opens. A model whose
description is not enough to make it again, as a TorchModel's, has its code beside it, in
``model.npz.pickle``, because ``PipelineModel.load`` cannot be given one. An estimator has the same
files, with initial parameters, where its model has code or such parameters.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReader, MLWriter

from sparkstrom.base.errors import UsageError, first_line
from sparkstrom.checkpoint.store import load_model, save_model
from sparkstrom.models.base import Exporting, Flat, FlatModel, Starting, buffers_to_save
from sparkstrom.models.registry import from_description, says_all
from sparkstrom.spark.driver.option_json import from_json, to_json
from sparkstrom.spark.driver.pickling import packed
from sparkstrom.spark.executor.inference import TrainedModel
from sparkstrom.spark.ml.estimator_params import NAMES

FOLDER, NAME = "model", "model.npz"
CODE = f"{NAME}.pickle"
OURS, COLUMNS = "sparkstrom", "columns"  # our part of the metadata, and names that are no string
VALUES = ("model", "master", "earlyStopping")  # Params that are values, not JSON by themselves
DAMAGE = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError),
    *(TypeError, ValueError, RecursionError),
)
OF_THIS_PROGRAM = ("listeners",)  # a saved estimator has none


def context_here(reader_or_writer: Any) -> Any:
    """The SparkContext of one. Raise UsageError over Spark Connect, which has none."""
    from pyspark.sql.utils import is_remote

    if is_remote():
        raise UsageError(
            "files of estimators and their models are written and read by a SparkContext, which is"
            " not there over Spark Connect: save with network.save(path) and SparkNetwork.load, or"
            " start the program with spark-submit, without .remote(...)"
        )
    return reader_or_writer.sc


class EstimatorWriter(MLWriter):
    """Writes an estimator: its model is described, not trained."""

    def __init__(self, instance: Any) -> None:
        super().__init__()
        self._instance = instance

    def saveImpl(self, path: str) -> None:
        """Write the metadata. Raise UsageError for an option that cannot be written."""
        estimator = self._instance
        model = estimator.of("model")
        described = model.describe() if model is not None else {}
        has_files = bool(described) and (isinstance(model, Starting) or not says_all(described))
        ours = {
            "model": described or None,
            "files": has_files,
            "master": to_json(estimator.of("master")),
            "earlyStopping": to_json(estimator.of("earlyStopping")),
        }
        _save_metadata(estimator, path, context_here(self), ours, skip=(*VALUES, *OF_THIS_PROGRAM))
        if has_files:
            _put_model(context_here(self), path, model, model.initial(), epochs=0)


class EstimatorReader(MLReader[Any]):
    """Reads what ``EstimatorWriter`` wrote."""

    def __init__(self, cls: type[Any]) -> None:
        super().__init__()
        self._cls = cls

    def load(self, path: str) -> Any:
        """The estimator. Raise UsageError for a model that cannot be made again."""
        with _named_damage(path):
            return self._load(path)

    def _load(self, path: str) -> Any:
        metadata = DefaultParamsReader.loadMetadata(path, context_here(self))
        estimator = self._cls()
        estimator._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(estimator, metadata)
        saved = dict(metadata[OURS])
        described, columns = saved.pop("model"), saved.pop(COLUMNS, {})
        if saved.pop("files", False):
            model, parameters, _ = _get_model(context_here(self), path)
            if isinstance(model, Starting):
                model.start_from(parameters)
            estimator.setModel(model)
        elif described is not None:
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
        _save_metadata(instance, path, context_here(self), {"several": instance.several})
        _put_model(
            context_here(self),
            path,
            trained.open(),
            trained.parameters,
            epochs=instance.epochs_trained,
            exports=True,
        )


class ModelReader(MLReader[Any]):
    """Reads what ``ModelWriter`` wrote; with ``model(...)`` no code that was saved is run."""

    def __init__(self, cls: type[Any]) -> None:
        super().__init__()
        self._cls = cls
        self._model: FlatModel | None = None

    def model(self, model: FlatModel) -> ModelReader:
        """One like the saved one, whose code is taken instead of the saved one's."""
        self._model = model
        return self

    def load(self, path: str) -> Any:
        """The trained model. Raise UsageError where files are missing or do not fit together."""
        with _named_damage(path):
            return self._load(path)

    def _load(self, path: str) -> Any:
        metadata = DefaultParamsReader.loadMetadata(path, context_here(self))
        model, parameters, epochs = _get_model(context_here(self), path, self._model)
        several = metadata[OURS].get("several", False)
        instance = self._cls(TrainedModel.of(model, parameters), None, epochs, several=several)
        instance._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(instance, metadata)
        return instance._set(**_names_in(metadata[OURS].get(COLUMNS, {})))


@contextlib.contextmanager
def _named_damage(path: str) -> Iterator[None]:
    """Turn what damaged metadata raise into a UsageError with the path."""
    try:
        yield
    except UsageError as error:
        if path in str(error):
            raise
        raise UsageError(f"{path}: {error}") from error
    except DAMAGE as error:
        raise UsageError(
            f"{path} holds no stage that sparkstrom saved, or a damaged one"
            f" ({type(error).__name__}: {first_line(error)}): save it again"
        ) from error


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


def _put_model(
    context: Any,
    path: str,
    model: FlatModel,
    parameters: Flat,
    epochs: int,
    *,
    exports: bool = False,
) -> None:
    """Files beside the metadata; ``exports``: also one that its own library opens."""
    described = model.describe()
    with tempfile.TemporaryDirectory(prefix="sparkstrom-save-") as folder:
        save_model(
            Path(folder) / NAME,
            described,
            parameters,
            epochs,
            buffers=buffers_to_save(model),
            exported=model.exported() if exports and isinstance(model, Exporting) else None,
        )
        if not says_all(described):
            (Path(folder) / CODE).write_bytes(packed(model))
        for file in sorted(Path(folder).iterdir()):
            _put(context, file, f"{path}/{FOLDER}/{file.name}")


def _get_model(
    context: Any, path: str, given: FlatModel | None = None
) -> tuple[FlatModel, Flat, int]:
    """Model, parameters and epochs. ``given`` is taken instead of what the files make."""
    with tempfile.TemporaryDirectory(prefix="sparkstrom-load-") as folder:
        for name in (NAME, f"{NAME}.json"):
            _get(context, f"{path}/{FOLDER}/{name}", Path(folder) / name)
        code = f"{path}/{FOLDER}/{CODE}"
        if given is None and not _says_all_of(Path(folder) / f"{NAME}.json"):
            if not _exists(context, code):
                return load_model(Path(folder) / NAME)
            _get(context, code, Path(folder) / CODE)
            given = _unpickled((Path(folder) / CODE).read_bytes(), code)
        return load_model(Path(folder) / NAME, given)


def _says_all_of(description: Path) -> bool:
    """Whether a model is made from its description alone, so that no pickle is opened."""
    try:
        model = json.loads(description.read_text("utf-8"))["model"]
        return bool(says_all(model))
    except (ValueError, TypeError, KeyError, AttributeError):
        return True  # load_model says what is wrong with it


def _unpickled(content: bytes, source: str) -> FlatModel:
    """A model by its code. Raise UsageError where what it needs is not here."""
    try:
        model: FlatModel = pickle.loads(content)
    except Exception as error:  # whatever a user's __setstate__ or a missing module raises
        raise UsageError(
            f"{source} holds the code of a model, which cannot be opened here"
            f" ({type(error).__name__}: {error}): install what it was saved with, or load the stage"
            " by SparkstromModel.read().model(one_like_it).load(path)"
        ) from error
    return model


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


def _exists(context: Any, name: str) -> bool:
    system, path, _ = _hadoop(context, name)
    return bool(system.exists(path))


def _hadoop(context: Any, name: str) -> tuple[Any, Any, Any]:
    make = context._jvm.org.apache.hadoop.fs.Path
    path = make(name)
    return path.getFileSystem(context._jsc.hadoopConfiguration()), path, make
