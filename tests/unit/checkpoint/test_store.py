"""Tests of saved models: they load as saved, and failed writes and wrong files do no harm."""

from __future__ import annotations

import json
import os
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkstrom import SharedTrainingMaster
from sparkstrom.base.errors import SetupError, UsageError
from sparkstrom.checkpoint import saved_model as store
from sparkstrom.checkpoint.saved_model import (
    check_same_model,
    description_path,
    load_model,
    save_model,
)
from sparkstrom.models import Adam, DenseNetwork

MODEL = DenseNetwork([4, 3], updater=Adam(), seed=5)


def save(path: Path, value: float = 0.0, epochs: int = 7, model: Any = MODEL) -> None:
    parameters = model.initial() + np.float32(value)
    save_model(path, model.describe(), parameters, epochs)


def test_saved_model_loads_with_parameters_and_epochs(tmp_path: Path) -> None:
    save(tmp_path / "deep" / "model.npz")
    model, parameters, epochs = load_model(tmp_path / "deep" / "model.npz")
    assert model.describe() == MODEL.describe()
    np.testing.assert_array_equal(parameters, MODEL.initial())
    assert epochs == 7


def test_saved_files_keep_name_without_suffix(tmp_path: Path) -> None:
    save(tmp_path / "model")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "model.json"]
    assert json.loads(description_path(tmp_path / "model").read_text())["n_params"] == 15


@pytest.mark.parametrize("prefix", ["file:", "file://", "~"])
def test_local_url_prefixes_and_home_resolve_to_path(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = "~/model.npz" if prefix == "~" else f"{prefix}{tmp_path}/model.npz"
    with store.path_to_save(path) as given, store.path_to_load(path) as found:
        assert given == found == tmp_path / "model.npz"


@pytest.mark.parametrize("wrong", [Path("s3://bucket/net.npz"), "hdfs:/net.npz"])
def test_path_object_of_url_raises_usage_error(wrong: Any) -> None:
    """pathlib removes a slash of a URL; before, a file in the folder "s3:" was written."""
    named = r"=.*(s3|hdfs):/[^/].*: would be a local path; write a URL as a string"
    with pytest.raises(UsageError, match=f"path{named}"), store.path_to_save(wrong):
        pass
    with pytest.raises(UsageError, match=f"checkpoint_directory{named}"):
        SharedTrainingMaster(checkpoint_directory=wrong)


@pytest.mark.parametrize("failing", [1, 2])
def test_failed_save_keeps_previous_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """If writing either file fails, the previously saved model can still be loaded."""
    save(tmp_path / "model.npz", 1.0, epochs=1)
    calls = 0

    def fsync(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.os, "fsync", fsync)
    with pytest.raises(SetupError, match=r"model\.npz.* cannot be written .*No space"):
        save(tmp_path / "model.npz", 2.0, epochs=2)
    _, parameters, epochs = load_model(tmp_path / "model.npz")
    np.testing.assert_array_equal(parameters, MODEL.initial() + np.float32(1.0))
    assert epochs == 1


def test_files_of_models_with_different_shapes_are_rejected(tmp_path: Path) -> None:
    """Two files of models with different shapes are refused."""
    save(tmp_path / "one.npz")
    save(tmp_path / "other.npz", model=DenseNetwork([5, 3]))
    description_path(tmp_path / "one.npz").replace(description_path(tmp_path / "other.npz"))
    with pytest.raises(UsageError, match=r"requires float32\[15\]: .* not saved together"):
        load_model(tmp_path / "other.npz")


def test_missing_empty_or_truncated_file_is_rejected(tmp_path: Path) -> None:
    """A missing, empty, cut or foreign file is refused."""
    with pytest.raises(UsageError, match="is not a saved model"):
        load_model(tmp_path / "nothing.npz")
    save(tmp_path / "model.npz")
    for content in (b"", b"no zip", (tmp_path / "model.npz").read_bytes()[:100]):
        (tmp_path / "broken.npz").write_bytes(content)
        description_path(tmp_path / "broken.npz").write_text("{}")
        with pytest.raises(UsageError, match="is not a saved model"):
            load_model(tmp_path / "broken.npz")
    np.save(tmp_path / "array.npy", np.zeros(15, np.float32))
    description_path(tmp_path / "array.npy").write_text("{}")
    with pytest.raises(UsageError, match="is not a saved model"):
        load_model(tmp_path / "array.npy")


@pytest.mark.parametrize("text", ["", "[", "{}", '{"format": 99}', "[]", '{"format": 1}'])
def test_invalid_description_raises_usage_error(tmp_path: Path, text: str) -> None:
    """A description that is not JSON of a known format is refused."""
    save(tmp_path / "model.npz")
    description_path(tmp_path / "model.npz").write_text(text)
    with pytest.raises(UsageError):
        load_model(tmp_path / "model.npz")


def test_npz_without_parameters_is_rejected(tmp_path: Path) -> None:
    """An npz file without an array of parameters is refused."""
    save(tmp_path / "model.npz")
    np.savez(tmp_path / "model.npz", other=np.zeros(15, np.float32))
    with pytest.raises(UsageError, match="is not a saved model"):
        load_model(tmp_path / "model.npz")


def test_npz_with_pickled_objects_is_rejected(tmp_path: Path) -> None:
    save(tmp_path / "model.npz")
    np.savez(tmp_path / "model.npz", parameters=np.array([object()]))
    with pytest.raises(UsageError, match="is not a saved model"):
        load_model(tmp_path / "model.npz")


def test_files_of_different_saves_are_rejected(tmp_path):
    """Two files of different saves of one model are refused."""
    model = DenseNetwork([3, 2])
    for name in ("first", "second"):
        save_model(tmp_path / name, model.describe(), model.initial() + (name == "second"), 1)
    (tmp_path / "first.json").replace(tmp_path / "second.json")
    with pytest.raises(UsageError, match=r"not hold the parameters .* were not saved together"):
        load_model(tmp_path / "second")


class BufferedNetwork(DenseNetwork):
    """A network with buffers, as if it had statistics."""

    held = b""

    def buffers_bytes(self) -> bytes:
        return self.held

    def load_buffers_bytes(self, buffers: bytes) -> None:
        self.held = buffers

    def average_buffers(self, reports: list[bytes]) -> bytes:
        return max(reports)


def test_save_includes_buffers_and_exported_file(tmp_path: Path) -> None:
    """A save includes the model's buffers and a file for another library."""
    path = tmp_path / "model.npz"
    save_model(
        path, MODEL.describe(), MODEL.initial(), 7, buffers=b"12345", exported=(".pt", b"torch's")
    )
    assert (tmp_path / "model.npz.pt").read_bytes() == b"torch's"
    assert len(list(tmp_path.iterdir())) == 3
    given = BufferedNetwork([4, 3])
    model, parameters, _ = load_model(path, given)
    assert model is given
    assert given.held == b"12345"
    np.testing.assert_array_equal(parameters, MODEL.initial())
    load_model(path)  # without a given model, the buffers are ignored


def test_changed_buffers_are_rejected(tmp_path: Path) -> None:
    """Buffers that do not match the description's hash are refused."""
    path = tmp_path / "model.npz"
    save_model(path, MODEL.describe(), MODEL.initial(), 7, buffers=b"12345")
    with path.open("wb") as file:
        np.savez(file, parameters=MODEL.initial(), buffers=np.frombuffer(b"12346", np.uint8))
    with pytest.raises(UsageError, match="were not saved together"):
        load_model(path)


class NamedParametersNetwork(DenseNetwork):
    """A network whose description has parameter names, like models whose code is not saved."""

    names: tuple[str, ...] = ("a", "b")

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"parameters": [[name, [2]] for name in self.names]}


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (("a", "c"), r"has parameter \['b', \[2\]\], the given model has \['c', \[2\]\]"),
        (("a",), r"has parameter \['b', \[2\]\], the given model has None"),
    ],
)
def test_model_with_other_parameter_names_is_rejected(
    tmp_path: Path, names: tuple[str, ...], why: str
) -> None:
    """A model whose parameter names differ from the saved ones is refused."""
    path, given = tmp_path / "model.npz", NamedParametersNetwork([4, 3])
    save(path, model=given)
    load_model(path, given)
    given.names = names
    with pytest.raises(UsageError, match=why):
        load_model(path, given)


def test_model_of_other_kind_is_rejected(tmp_path: Path) -> None:
    save(tmp_path / "model.npz")

    class Other(DenseNetwork):
        def describe(self) -> dict[str, Any]:
            return {"kind": "torch"}

    with pytest.raises(UsageError, match="is of kind 'dense', the given model is 'torch'"):
        load_model(tmp_path / "model.npz", Other([4, 3]))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"hidden": "tanh"}, "with hidden='relu', the given model has 'tanh' in its place"),
        ({"loss": "squared_error"}, "with loss='cross_entropy', the given model has 'squared_"),
    ],
)
def test_model_with_other_activation_or_loss_is_rejected(
    tmp_path: Path, options: dict[str, Any], why: str
) -> None:
    """The models' parameters have equal names and shapes, but compute different functions."""
    path = tmp_path / "model.npz"
    save(path, model=DenseNetwork([4, 3]))
    with pytest.raises(UsageError, match=why):
        load_model(path, DenseNetwork([4, 3], **options))
    load_model(path, DenseNetwork([4, 3], updater=Adam(0.5), l2=0.1, seed=7))


def test_keys_missing_in_older_description_are_not_compared() -> None:
    """Keys that are missing in an older description are not compared."""
    current = DenseNetwork([4, 3]).describe()
    saved = {key: current[key] for key in ("kind", "parameters")}
    assert check_same_model(current, saved, "f") is None


NORMALIZER = {"name": "min_max", "minimum": [0.0], "maximum": [1.0]}


@pytest.mark.parametrize("kinds", [*product(["dense", "dl4j-dense"], repeat=2), ("dl4j", "dl4j")])
@pytest.mark.parametrize("own", [{}, {"normalizer": NORMALIZER}])
@pytest.mark.parametrize(
    "saved", [{}, {"normalizer": NORMALIZER}, {"normalizer": NORMALIZER | {"maximum": [2.0]}}]
)
def test_normalizer_is_compared_even_if_one_model_has_none(
    kinds: tuple[str, str], own: dict[str, Any], saved: dict[str, Any]
) -> None:
    """A description without the key is of a model without a normalizer."""
    current, other = own | {"kind": kinds[0]}, saved | {"kind": kinds[1]}
    if own == saved:
        assert check_same_model(current, other, "f") is None
    elif kinds == ("dl4j", "dl4j"):
        assert "model with normalizer" in (check_same_model(current, other, "f") or "")
    else:
        with pytest.raises(UsageError, match="f is of a model with normalizer"):
            check_same_model(current, other, "f")


def test_tuples_in_description_equal_lists_in_file() -> None:
    own = {"kind": "own", "parameters": [("w", (3,))]}
    assert check_same_model(own, json.loads(json.dumps(own)), "f") is None


def test_loading_possibly_different_model_logs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Loading a model that may compute something else logs one warning."""

    class Module(DenseNetwork):
        text = "ReLU()"

        def describe(self) -> dict[str, Any]:
            return super().describe() | {"kind": "torch", "text": self.text}

    model = Module([4, 3])
    save(tmp_path / "model", model=model)
    load_model(tmp_path / "model", model)
    assert caplog.messages == []
    model.text = "Tanh()"
    load_model(tmp_path / "model", model)
    (message,) = caplog.messages
    assert "/model was saved from a model with module='ReLU()', the given model has" in message


TEXT = "Sequential(\n  (0): Linear(3, 4)\n  (1): {}\n)"
LAYER = {"class_name": "Dense", "config": {"name": "dense_1", "activation": "relu"}}


@pytest.mark.parametrize(
    ("kind", "saved", "own", "why"),
    [
        (
            "torch",
            {"text": TEXT.format("ReLU()")},
            {"text": TEXT.format("Tanh()")},
            "f was saved from a model with module (line 3)='(1): ReLU()', the given model has ",
        ),
        (
            "lightning",
            {"text": TEXT.format("<function f at 0x7f01>")},
            {"text": TEXT.format("<function f at 0x7f02>")},
            None,
        ),
        (
            "dl4j",
            {"configuration": {"confs": [{"activationFn": "a"}]}},
            {"configuration": {"confs": [{"activationFn": "b"}, {}]}},
            "configuration['confs'][0]['activationFn']='a', the given model has 'b' in its place",
        ),
        (
            "dl4j",
            {"configuration": {"iupdater": {"learningRate": 0.1}, "epochCount": 1}},
            {"configuration": {"iUpdater": {"learningRate": 0.2}, "epochCount": 9}},
            None,
        ),
        (
            "keras",
            {"model": {"layers": [LAYER]}},
            {"model": {"layers": [LAYER | {"config": {"name": "dense_7", "activation": "tanh"}}]}},
            "model['layers'][0]['config']['activation']='relu', the given model has 'tanh'",
        ),
        (
            "keras",
            {"model": {"layers": [LAYER]}, "optimizer": 1},
            {"model": {"layers": [LAYER | {"dtype": None, "name": None}]}, "optimizer": 2},
            None,
        ),
        ("the user's", {"text": "a"}, {"text": "b"}, None),
    ],
)
def test_only_differences_in_computation_give_warning(
    kind: str,
    saved: dict[str, Any],
    own: dict[str, Any],
    why: str | None,
) -> None:
    """Options of training and numbers that Python or Keras assign may differ without a warning."""
    warning = check_same_model({"kind": kind, **own}, {"kind": kind, **saved}, "f")
    assert (warning is None) == (why is None)
    assert (why or "") in (warning or "")


def test_save_does_not_write_through_planted_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saving writes through no link, neither with an old temporary name nor a predicted one."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    monkeypatch.setattr("secrets.token_hex", lambda count: "foreseen")
    (tmp_path / f"model.{os.getpid()}.tmp").symlink_to(victim)
    save(tmp_path / "model")
    (tmp_path / "model.foreseen.tmp").symlink_to(victim)
    with pytest.raises(SetupError, match="File exists"):
        save(tmp_path / "model")
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("name", ["model", "model.json"])
def test_named_pipe_is_rejected_without_waiting(tmp_path: Path, name: str) -> None:
    """A named pipe in place of either file is refused without waiting for a writer."""
    save(tmp_path / "model")
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(UsageError, match="not a regular file"):
        load_model(tmp_path / "model")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"relu"', '"tanh"'),
        ('"epochs": 7', '"epochs": -7'),
        ('"epochs": 7', '"epochs": 8'),
        ('"l2": 0.0', '"l2": 0.5'),
        ('"description_sha256"', '"dascription_sha256"'),
    ],
)
def test_changed_description_is_rejected_as_damaged(
    tmp_path: Path, before: str, after: str
) -> None:
    """A description whose content was changed is refused."""
    save(tmp_path / "model.npz", model=DenseNetwork([4, 3, 2], hidden="relu", seed=5))
    path = description_path(tmp_path / "model.npz")
    text = path.read_text()
    assert text.count(before) == 1
    path.write_text(text.replace(before, after))
    with pytest.raises(UsageError, match=r"model\.npz\.json is damaged"):
        load_model(tmp_path / "model.npz")
    path.write_text(json.dumps(json.loads(text)))  # changed whitespace does not matter
    load_model(tmp_path / "model.npz")
