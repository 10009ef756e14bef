"""Save and load estimators and their models: Spark ML's metadata plus sparkstrom's own files.

The directory of a saved model contains ``metadata`` (the Params, as for every pipeline stage) and
the folder ``model``. In this folder are ``model.npz`` (the parameters, which plain NumPy can open)
and ``model.npz.json`` (the model's description), in the format of ``SparkNetwork.save``. A model
that cannot be rebuilt from its description, such as a TorchModel, is also pickled with its code to
``model.npz.pickle``, because a user cannot pass a model to ``PipelineModel.load``.

The directory of a saved estimator has the folder ``model`` only if ``metadata`` cannot describe the
untrained model: it starts from given parameters, or its code must be pickled. The directory also
has the file ``model/model.npz.optimizer`` if an imported network came with its optimizer's state.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReader

from sparkstrom.base.errors import UsageError, WireError, first_line
from sparkstrom.checkpoint.saved_model import load_model, save_model
from sparkstrom.codec.optimizer_state_codec import decode_state_untrusted, encode_state
from sparkstrom.fit.network_state import copy_if_used
from sparkstrom.models.base import (
    CanRestoreOptimizerState,
    Exporting,
    Flat,
    FlatModel,
    HasInitialValues,
    State,
    buffers_to_save,
    from_description,
    is_self_contained,
)
from sparkstrom.options.resolution import from_json, to_json
from sparkstrom.spark.executor.entry_points import pickle_by_value
from sparkstrom.spark.executor.inference import TrainedModel
from sparkstrom.spark.ml.params import MULTI_COLUMN_PARAMS, InstanceWriter, is_json_value

MODEL_FOLDER, MODEL_FILE = "model", "model.npz"
CODE_FILE, STATE_FILE = f"{MODEL_FILE}.pickle", f"{MODEL_FILE}.optimizer"
# Sparkstrom's key in the metadata, and below it the key of column names that are not one string.
METADATA_KEY, COLUMNS_KEY = "sparkstrom", "columns"
OBJECT_PARAMS = ("model", "master", "earlyStopping")  # Params whose values are converted to JSON
DAMAGE_ERRORS = (  # exceptions that damaged files cause
    *(ArithmeticError, AssertionError, AttributeError, LookupError),
    *(TypeError, ValueError, RecursionError, WireError),
)
UNSAVED_PARAMS = ("listeners",)  # Params that are not saved: objects of the running program


def require_spark_context(reader_or_writer: Any) -> Any:
    """Return the SparkContext of a reader or writer. Raise UsageError for Spark Connect."""
    from pyspark.sql.utils import is_remote

    if is_remote():
        raise UsageError(
            "files of estimators and their models are written and read by a SparkContext, which"
            " Spark Connect does not have: save with network.save(path) and SparkNetwork.load, or"
            " start the program with spark-submit, without .remote(...)"
        )
    return reader_or_writer.sc


class EstimatorWriter(InstanceWriter):
    """Writes a SparkstromEstimator with its untrained model."""

    def saveImpl(self, path: str) -> None:
        """Write the estimator's files. Raise UsageError for an option that cannot be written."""
        estimator = self._instance
        model = estimator.get_or_none("model")
        description = None if model is None else model.describe()
        has_files = _needs_files(model, description)
        fields = {
            "model": description,
            "files": has_files,
            "master": to_json(estimator.get_or_none("master")),
            "earlyStopping": to_json(estimator.get_or_none("earlyStopping")),
        }
        _save_metadata(
            estimator,
            path,
            require_spark_context(self),
            fields,
            skip=(*OBJECT_PARAMS, *UNSAVED_PARAMS),
        )
        if has_files:
            _write_untrained_model(require_spark_context(self), path, model)


class StageReader(MLReader[Any]):
    """Reads an estimator or a trained model. Subclasses implement ``_load``."""

    def __init__(self, cls: type[Any]) -> None:
        """Prepare to read an instance of class ``cls``."""
        super().__init__()
        self._cls = cls

    def load(self, path: str) -> Any:
        """Return the stage saved in ``path``.

        Raise UsageError if files are missing, damaged, or of another model.
        """
        with _explain_damage(path):
            return self._load(path)

    @abstractmethod
    def _load(self, path: str) -> Any:
        """Return the stage saved in ``path``; ``load`` converts the errors of damaged files."""


class EstimatorReader(StageReader):
    """Reads the files that ``EstimatorWriter`` wrote."""

    def _load(self, path: str) -> Any:
        """Return the estimator saved in ``path``."""
        metadata = DefaultParamsReader.loadMetadata(path, require_spark_context(self))
        estimator = self._cls()
        estimator._resetUid(metadata["uid"])
        _set_params(estimator, metadata)
        fields = dict(metadata[METADATA_KEY])
        description, columns = fields.pop("model"), fields.pop(COLUMNS_KEY, {})
        if fields.pop("files", False):
            estimator.setModel(_read_untrained_model(require_spark_context(self), path))
        elif description is not None:
            estimator.setModel(from_description(description))
        found = {name: from_json(value) for name, value in fields.items() if value is not None}
        return estimator._set(**found, **_restore_columns(columns))


class ModelWriter(InstanceWriter):
    """Writes a SparkstromModel."""

    def saveImpl(self, path: str) -> None:
        """Write metadata and model files, on any file system that Hadoop supports."""
        instance, trained = self._instance, self._instance.trained
        _save_metadata(instance, path, require_spark_context(self), {"several": instance.several})
        _write_model(
            require_spark_context(self),
            path,
            trained.open(),
            trained.parameters,
            epochs=instance.epochs_trained,
            exports=True,
        )


class ModelReader(StageReader):
    """Reads the files that ``ModelWriter`` wrote. If ``model`` was called, no saved code is run."""

    def __init__(self, cls: type[Any]) -> None:
        """Prepare to read a trained model of class ``cls``."""
        super().__init__(cls)
        self._model: FlatModel | None = None

    def model(self, model: FlatModel) -> ModelReader:
        """Set the model that ``load`` gives the saved parameters; return this reader.

        Otherwise ``load`` rebuilds or unpickles the saved model.
        """
        self._model = model
        return self

    def _load(self, path: str) -> Any:
        """Return the trained model saved in ``path``."""
        metadata = DefaultParamsReader.loadMetadata(path, require_spark_context(self))
        model, parameters, epochs = _read_model(require_spark_context(self), path, self._model)
        several = metadata[METADATA_KEY].get("several", False)
        instance = self._cls(
            TrainedModel.from_model(model, parameters), None, epochs, several=several
        )
        instance._resetUid(metadata["uid"])
        _set_params(instance, metadata)
        return instance._set(**_restore_columns(metadata[METADATA_KEY].get(COLUMNS_KEY, {})))


@contextlib.contextmanager
def _explain_damage(path: str) -> Iterator[None]:
    """During the block, convert errors caused by damaged files to a UsageError with the path."""
    try:
        yield
    except UsageError as error:
        if path in str(error):
            raise
        raise UsageError(f"{path}: {error}") from error
    except DAMAGE_ERRORS as error:
        raise UsageError(
            f"{path} holds no stage that sparkstrom saved, or a damaged one"
            f" ({type(error).__name__}: {first_line(error)}): save it again"
        ) from error


def _save_metadata(
    instance: Any, path: str, context: Any, fields: dict[str, Any], skip: tuple[str, ...] = ()
) -> None:
    """Write Spark ML's metadata file, with ``fields`` and all Params except those in ``skip``."""
    stage = instance.copy()
    column_params = {
        name: stage.getOrDefault(name) for name in MULTI_COLUMN_PARAMS if stage.hasParam(name)
    }
    structured = {
        name: value for name, value in column_params.items() if not isinstance(value, str)
    }
    for name in (*skip, *structured):
        stage._paramMap.pop(stage.getParam(name), None)
        stage._defaultParamMap.pop(stage.getParam(name), None)
    columns = {name: _represent_columns(value) for name, value in structured.items()}
    fields = fields | ({COLUMNS_KEY: columns} if columns else {})
    DefaultParamsWriter.saveMetadata(stage, path, context, extraMetadata={METADATA_KEY: fields})


def _set_params(instance: Any, metadata: dict[str, Any]) -> None:
    """Set the Params in Spark ML's metadata, also to None, as in ``setProbabilityCol(None)``.

    Spark ML's own reader would convert None, which converters refuse.
    """
    params = metadata["paramMap"]
    given = {name: value for name, value in params.items() if value is not None}
    DefaultParamsReader.getAndSetParams(instance, metadata | {"paramMap": given})
    instance._set(**dict.fromkeys(params.keys() - given.keys()))


def _needs_files(model: FlatModel | None, description: dict[str, Any] | None) -> bool:
    """Return whether an estimator's model must be saved with its initial values or its code."""
    if description is None:
        return False
    return isinstance(model, HasInitialValues) or not is_self_contained(description)


def _write_untrained_model(context: Any, path: str, model: FlatModel) -> None:
    """Write the files of an estimator's model, with initial parameters and optimizer state."""
    state = model.continuing_state() if isinstance(model, CanRestoreOptimizerState) else {}
    _write_model(context, path, model, model.initial(), epochs=0, state=state)


def _read_untrained_model(context: Any, path: str) -> FlatModel:
    """Return the model of a saved estimator; fits start from its saved parameters and state."""
    model, parameters, _ = _read_model(context, path)
    if isinstance(model, HasInitialValues):
        model.start_from(parameters)
    source = f"{path}/{MODEL_FOLDER}/{STATE_FILE}"
    if isinstance(model, CanRestoreOptimizerState) and _exists(context, source):
        with tempfile.TemporaryDirectory(prefix="sparkstrom-load-") as folder:
            _download(context, source, Path(folder) / STATE_FILE)
            model.continue_from(decode_state_untrusted((Path(folder) / STATE_FILE).read_bytes()))
    return model


def _write_model(
    context: Any,
    path: str,
    model: FlatModel,
    parameters: Flat,
    epochs: int,
    *,
    exports: bool = False,
    state: State | None = None,
) -> None:
    """Write the model's files to the folder ``model`` in ``path``.

    If ``exports`` is True and the model supports it, also write a file in the format of its own
    library. ``state`` is an optimizer state, which is written unless it is empty or None.
    """
    description = model.describe()
    with tempfile.TemporaryDirectory(prefix="sparkstrom-save-") as folder:
        save_model(
            Path(folder) / MODEL_FILE,
            description,
            parameters,
            epochs,
            buffers=buffers_to_save(model),
            exported=model.exported() if exports and isinstance(model, Exporting) else None,
        )
        if not is_self_contained(description):
            (Path(folder) / CODE_FILE).write_bytes(pickle_by_value(model))
        if state:
            (Path(folder) / STATE_FILE).write_bytes(encode_state(state))
        for file in sorted(Path(folder).iterdir()):
            _upload(context, file, f"{path}/{MODEL_FOLDER}/{file.name}")


def _read_model(
    context: Any, path: str, given: FlatModel | None = None
) -> tuple[FlatModel, Flat, int]:
    """Return the saved model, its parameters and the number of epochs trained.

    ``given`` replaces the saved model, whose code is then not unpickled.
    """
    with tempfile.TemporaryDirectory(prefix="sparkstrom-load-") as folder:
        for name in (MODEL_FILE, f"{MODEL_FILE}.json"):
            _download(context, f"{path}/{MODEL_FOLDER}/{name}", Path(folder) / name)
        code = f"{path}/{MODEL_FOLDER}/{CODE_FILE}"
        if given is None and not _is_self_describing(Path(folder) / f"{MODEL_FILE}.json"):
            if not _exists(context, code):
                return load_model(Path(folder) / MODEL_FILE)
            _download(context, code, Path(folder) / CODE_FILE)
            given = _unpickle_model((Path(folder) / CODE_FILE).read_bytes(), code)
        return load_model(Path(folder) / MODEL_FILE, copy_if_used(given))


def _is_self_describing(description: Path) -> bool:
    """Return whether a saved model can be rebuilt from its description, without its pickle.

    Also return True if the description is damaged; ``load_model`` will report that.
    """
    try:
        model = json.loads(description.read_text("utf-8"))["model"]
        return bool(is_self_contained(model))
    except (ValueError, TypeError, KeyError, AttributeError):
        return True  # load_model reports what is wrong with it


def _unpickle_model(content: bytes, source: str) -> FlatModel:
    """Return a model from its pickle. Raise UsageError if it cannot be unpickled here."""
    try:
        model: FlatModel = pickle.loads(content)
    except Exception as error:  # whatever a user's __setstate__ or a missing module raises
        raise UsageError(
            f"{source} holds the code of a model, which cannot be opened here"
            f" ({type(error).__name__}: {error}): install what it was saved with, or load the stage"
            " by SparkstromModel.read().model(one_like_it).load(path)"
        ) from error
    return model


def _represent_columns(value: Any) -> list[Any]:
    """Return column names as [kind, value], because JSON has no tuples and only string keys."""
    if isinstance(value, dict) and not is_json_value(value):
        return ["pairs", list(value.items())]
    return [type(value).__name__, value]


def _restore_columns(columns: dict[str, Any]) -> dict[str, Any]:
    """Return column names as the user gave them; JSON stores a tuple as a list."""
    kinds: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "pairs": dict}
    return {
        name: kinds[kind](value) if kind in kinds else value
        for name, (kind, value) in columns.items()
    }


def _upload(context: Any, source: Path, target: str) -> None:
    """Copy a local file to any file system that Hadoop supports; replace an existing file."""
    system, path, make = _resolve_hadoop_path(context, target)
    system.copyFromLocalFile(False, True, make(f"file://{source}"), path)


def _download(context: Any, source: str, target: Path) -> None:
    """Copy a file from a Hadoop file system. Raise UsageError if it does not exist."""
    system, path, make = _resolve_hadoop_path(context, source)
    if not system.exists(path):
        raise UsageError(f"{source} does not exist: this is not the directory of a saved model")
    system.copyToLocalFile(False, path, make(f"file://{target}"), True)  # True: no checksum file


def _exists(context: Any, name: str) -> bool:
    """Return whether a file exists on its Hadoop file system."""
    system, path, _ = _resolve_hadoop_path(context, name)
    return bool(system.exists(path))


def _resolve_hadoop_path(context: Any, name: str) -> tuple[Any, Any, Any]:
    """Return the Hadoop file system and path of a URL, and the Java class for paths."""
    make = context._jvm.org.apache.hadoop.fs.Path
    path = make(name)
    return path.getFileSystem(context._jsc.hadoopConfiguration()), path, make
