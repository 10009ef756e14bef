"""Tests of saved estimators: initial parameters, optimizer state, code and names of columns."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.checkpoint.saved_model import load_model, save_model
from sparkstrom.ml import SparkstromEstimator
from sparkstrom.models import DenseNetwork, from_dl4j
from sparkstrom.models.base import from_description
from sparkstrom.spark.ml import persistence
from sparkstrom.spark.ml.persistence import (
    STATE_FILE,
    _needs_files,
    _represent_columns,
    _restore_columns,
)

UPLOAD, DOWNLOAD = persistence._upload, persistence._download
DATA = Path(__file__).parents[2] / "conformance/data"


@pytest.fixture(autouse=True)
def local_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy files without Hadoop, and look for them on the local disk."""

    def copy_file(_: Any, source: Any, target: Any) -> None:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)

    monkeypatch.setattr(persistence, "_upload", copy_file)
    monkeypatch.setattr(persistence, "_download", copy_file)
    monkeypatch.setattr(persistence, "_exists", lambda _, name: Path(name).exists())


class UndescribedModel(DenseNetwork):
    """A user's own class, whose description is empty."""

    def describe(self) -> dict[str, Any]:
        return {}

    def __reduce__(self) -> Any:
        return type(self), ([3, 2],)


def save_and_load(model: Any, path: Path) -> Any:
    persistence._write_untrained_model(None, str(path), model)
    return persistence._read_untrained_model(None, str(path))


@pytest.mark.parametrize("name", ["dl4j-mlp0", "dl4j-mlp1"])  # a DenseNetwork; a module of torch
def test_imported_network_keeps_parameters_and_optimizer_state(tmp_path: Path, name: str) -> None:
    """An imported network keeps parameters and optimizer state when it is saved twice."""
    if name == "dl4j-mlp1":
        pytest.importorskip("torch")
    model = from_dl4j(DATA / f"{name}.zip")
    first = save_and_load(model, tmp_path / "first")
    again = save_and_load(copy.deepcopy(first), tmp_path / "again")  # as each fit copies it
    assert type(again) is type(model)
    assert again.initial().tobytes() == model.initial().tobytes()
    state, wanted = again.continuing_state(), model.continuing_state()
    assert wanted
    assert state.keys() == wanted.keys()
    for key, value in wanted.items():
        np.testing.assert_array_equal(state[key], value)
    again.bind(again.initial())
    again.load_updater_state(state)


def test_rejects_damaged_optimizer_state(tmp_path: Path) -> None:
    save_and_load(from_dl4j(DATA / "dl4j-mlp0.zip"), tmp_path / "saved")
    (tmp_path / "saved/model" / STATE_FILE).write_bytes(b"garbled")
    with (
        pytest.raises(UsageError, match="saved holds no stage that sparkstrom saved, or a damaged"),
        persistence._explain_damage(str(tmp_path / "saved")),
    ):
        persistence._read_untrained_model(None, str(tmp_path / "saved"))


def test_older_files_of_imported_networks_are_readable(tmp_path: Path) -> None:
    """Files of older versions, which describe an imported network as dense, can be read."""
    model, path = from_dl4j(DATA / "dl4j-mlp0.zip"), tmp_path / "model.npz"
    described = {**model.describe(), "kind": "dense"}
    assert type(from_description(described)) is DenseNetwork
    save_model(path, described, model.initial(), epochs=1)
    for given in (None, model):
        _, parameters, _ = load_model(path, given)
        assert parameters.tobytes() == model.initial().tobytes()
    save_model(path, model.describe(), model.initial(), epochs=1)
    load_model(path, DenseNetwork.from_description(described))


def test_model_with_empty_description_is_saved_with_code(tmp_path: Path) -> None:
    """A model with an empty description is saved with its code; before, it counted as no model."""
    model = UndescribedModel([3, 2])
    assert _needs_files(model, model.describe())
    assert type(save_and_load(model, tmp_path / "saved")) is UndescribedModel
    imported, made = from_dl4j(DATA / "dl4j-mlp0.zip"), DenseNetwork([3, 2])
    assert _needs_files(imported, imported.describe())
    assert not _needs_files(made, made.describe())
    assert not _needs_files(None, None)


@pytest.mark.parametrize("names", [("a", ["b", "c"]), {"y": "a"}, {0: "a", 1: "b"}, ["a", "b"]])
def test_saved_column_names_keep_tuples_and_integer_keys(names: Any) -> None:
    """Saving keeps tuples of columns, and integer keys, which number a model's outputs."""
    saved = json.loads(json.dumps({"predictionCol": _represent_columns(names)}))
    assert _restore_columns(saved) == {"predictionCol": names}


@pytest.mark.parametrize("name", ["a b", "50%", "a%20b#1"])
def test_local_paths_are_passed_to_hadoop_unescaped(name: str, tmp_path: Path) -> None:
    """Local paths are passed to Hadoop unchanged, because its paths do not decode %20."""
    made = []
    system = SimpleNamespace(
        copyFromLocalFile=lambda *_: None, copyToLocalFile=lambda *_: None, exists=lambda _: True
    )

    def make_path(text: str) -> Any:
        made.append(text)
        return SimpleNamespace(getFileSystem=lambda conf: system)

    hadoop = SimpleNamespace(fs=SimpleNamespace(Path=make_path))
    jvm = SimpleNamespace(org=SimpleNamespace(apache=SimpleNamespace(hadoop=hadoop)))
    context = SimpleNamespace(_jvm=jvm, _jsc=SimpleNamespace(hadoopConfiguration=lambda: None))
    UPLOAD(context, tmp_path / name, "hdfs:///model")
    DOWNLOAD(context, "hdfs:///model", tmp_path / name)
    assert made == ["hdfs:///model", f"file://{tmp_path}/{name}"] * 2


@pytest.mark.parametrize("name", ["weightCol", "batchSize", "seed", "probabilityCol"])
def test_param_set_to_none_is_loaded_as_none(name: str) -> None:
    """Before, the estimator was saved, and refused as damaged when it was loaded."""
    given = SparkstromEstimator(epochs=3).setParams(**{name: None})
    saved = {param.name: value for param, value in given._paramMap.items()}
    metadata = {"paramMap": json.loads(json.dumps(saved)), "defaultParamMap": {}}
    loaded = SparkstromEstimator()
    persistence._set_params(loaded, metadata | {"sparkVersion": "4.0.5"})
    assert loaded.getOrDefault("epochs") == 3
    assert loaded.get_or_none(name) is None
