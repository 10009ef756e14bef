"""Save and load models: parameters in an npz ``NAME``, a description in ``NAME.json``.

A PyTorch, JAX or Keras model adds a file that its own library opens, such as ``NAME.pt``.

``NAME.json`` has two digests: one of the parameters and buffers in ``NAME``, which proves that the
two files belong together, and one of the rest of ``NAME.json``. Files of earlier versions lack the
second digest.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from sparkstrom.base.errors import SetupError, SparkstromError, UsageError, first_line
from sparkstrom.base.option_types import check_path_argument, shown
from sparkstrom.base.untrusted_files import (
    READ_ERRORS,
    check_npz,
    create_beside,
    find_local_path,
    open_regular,
)
from sparkstrom.base.version import __version__
from sparkstrom.checkpoint.files import open_parent
from sparkstrom.models.base import Flat, FlatModel, from_description, load_buffers

log = logging.getLogger(__name__)

FORMAT = 1
DESCRIPTION_DIGEST_KEY = "description_sha256"
REQUIRED_KEYS = {"format", "model", "epochs", "sha256"}
OPTIONAL_KEYS = {"sparkstrom", "n_params", DESCRIPTION_DIGEST_KEY}
# Kinds with the same parameters: earlier versions saved most imported DenseNetworks as "dense".
EQUAL_KINDS = (("dense", "dl4j-dense"), ("dl4j-dense", "dense"))
# Keys that describe the computed function, by kind of model. Values of ``WARNED_KEYS`` also contain
# options that users change on purpose, such as dropout rates.
REFUSED_KEYS: dict[Any, tuple[str, ...]] = {
    "dense": ("hidden", "loss", "normalizer"),
    "dl4j-dense": ("hidden", "loss", "normalizer"),
}
WARNED_KEYS: dict[Any, tuple[str, ...]] = {
    "torch": ("text",),
    "lightning": ("text",),
    "dl4j": ("configuration", "normalizer"),
    "keras": ("outputs", "model"),
}
# Keys that a description lacks if there is no such part. If it lacks another key, then an earlier
# version wrote it.
OPTIONAL_PARTS = ("normalizer",)
# Names in messages of keys that users do not know.
KEY_NAMES = {"text": "module"}
MODEL_DIFFERS = (
    "{path} was saved from a model with {difference}: if this changes what the model computes, its"
    " outputs differ from the saved model's"
)
# Keys that describe the training and not the network; they are not compared.
TRAINING_KEYS = {"iupdater", "biasupdater", "iterationcount", "epochcount", "seed"}
# Keys of Keras' configurations that describe how the network was compiled and built.
KERAS_IGNORED = {"compile_config", "build_config", "build_input_shape"}
# Keys of Keras' configurations under which layers are referred to by name.
KERAS_REFERENCES = {"keras_history", "input_layers", "output_layers"}
# In strings, addresses of objects and numbers that Keras adds to names, unique in a process.
CHANGING = re.compile(r" at 0x[0-9a-f]+|_\d+$")


def description_path(path: Path) -> Path:
    """Return the path of the description file (``NAME.json``) of the model saved at ``path``."""
    return path.with_name(path.name + ".json")


@contextmanager
def path_to_save(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the local path at which to save a model; afterwards, if ``path`` is a URL, upload it.

    The description is uploaded last, so that readers notice a partial upload. A failed upload may
    make a model unreadable that was saved at the URL before.

    Args:
        path: A local path, or a URL of a file system that fsspec supports.

    Raises:
        UsageError: fsspec does not know the file system.
        SetupError: The files cannot be uploaded.
    """
    given = check_path_argument(path)
    if (local_path := find_local_path(given)) is not None:
        yield Path(local_path)
        return
    folder, name = open_parent(given)
    with tempfile.TemporaryDirectory(prefix="sparkstrom-") as directory:
        local = Path(directory) / name
        with _note_url_on_error(given, local):
            yield local
        try:
            folder.create()
            existing = set(folder.list_names())
            for file in sorted(Path(directory).iterdir(), key=description_path(local).__eq__):
                if file.name in existing:
                    folder.remove(file.name)
                folder.put(file.name, partial(_copy_from, file))
        except Exception as error:  # each file system has its own
            raise SetupError(
                f"{given} cannot be written ({type(error).__name__}: {first_line(error)}): save to"
                " a local path, or give another URL; a model saved there before may be damaged"
            ) from error


@contextmanager
def path_to_load(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the local path of a saved model; if ``path`` is a URL, that of a temporary copy.

    Args:
        path: A local path, or a URL of a file system that fsspec supports.

    Raises:
        UsageError: fsspec does not know the file system, or the files cannot be downloaded.
    """
    given = check_path_argument(path)
    if (local_path := find_local_path(given)) is not None:
        yield Path(local_path)
        return
    folder, name = open_parent(given)
    with tempfile.TemporaryDirectory(prefix="sparkstrom-") as directory:
        local = Path(directory) / name
        try:
            for file in (local, description_path(local)):
                with folder.open(file.name) as source, file.open("wb") as target:
                    shutil.copyfileobj(source, target)
        except Exception as error:  # each file system has its own
            raise UsageError(
                f"{given} cannot be read ({type(error).__name__}: {first_line(error)}): give the"
                " path or URL that save() wrote, NAME and NAME.json"
            ) from error
        with _note_url_on_error(given, local):
            yield local


@contextmanager
def _note_url_on_error(url: str, local: Path) -> Iterator[None]:
    """Add a note with the user's ``url`` to a SparkstromError that is raised in the block.

    The note is needed because the error names only the ``local`` copy.
    """
    try:
        yield
    except SparkstromError as error:
        error.add_note(f"{local} is a local copy of {url}")
        raise


def _copy_from(path: Path, target: IO[bytes]) -> None:
    """Write a local file's content to an open file."""
    with path.open("rb") as source:
        shutil.copyfileobj(source, target)


def save_model(
    path: Path,
    model: dict[str, Any],
    parameters: Flat,
    epochs: int,
    *,
    buffers: bytes = b"",
    exported: tuple[str, bytes] | None = None,
) -> None:
    """Write the files of a model. A failed save leaves previously saved files unchanged.

    Args:
        path: ``NAME``.
        model: the description that the model's ``describe`` returns.
        parameters: float32[n_params].
        epochs: number of epochs that the model was trained for.
        buffers: the model's encoded buffers, or b"" if the model has none.
        exported: suffix and content of the file for the model's own library; None: no such file.

    Raises:
        SetupError: a file cannot be written.
    """
    description = {
        "format": FORMAT,
        "sparkstrom": __version__,
        "model": model,
        "epochs": epochs,
        "n_params": int(parameters.size),
        # Detects a crash between the renames of the files.
        "sha256": _parameters_digest(parameters, buffers),
    }
    description[DESCRIPTION_DIGEST_KEY] = _description_digest(description)
    arrays = {"parameters": parameters}
    if buffers:
        arrays["buffers"] = np.frombuffer(buffers, np.uint8)
    npz = io.BytesIO()
    np.savez(npz, **arrays)  # type: ignore[arg-type]
    encoded = json.dumps(description, indent=2).encode()
    contents = {path: npz.getvalue(), description_path(path): encoded}
    if exported is not None:
        suffix, content = exported
        contents[path.with_name(path.name + suffix)] = content
    written: dict[Path, Path] = {}
    target = path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for target, content in contents.items():
            _write_temporary(target, content, written)
        for target, temporary in written.items():
            temporary.replace(target)
    except OSError as error:
        for temporary in written.values():
            temporary.unlink(missing_ok=True)
        raise SetupError(
            f"{target} cannot be written ({error.strerror or error}): make room or give another"
            " path; files saved there before are unchanged"
        ) from error


def _write_temporary(target: Path, content: bytes, written: dict[Path, Path]) -> None:
    """Write a file to disk under a temporary name, and store that name in ``written[target]``."""
    created, written[target] = create_beside(target)
    with created as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def load_model(path: Path, model: FlatModel | None = None) -> tuple[FlatModel, Flat, int]:
    """Read a saved model. Log a warning if ``model`` may differ from the saved one.

    Args:
        path: ``NAME``.
        model: a model created by the same code as the saved one, for models whose code is not
            saved; None: create the model from the description.

    Returns:
        The model, its parameters float32[n_params], and the number of epochs it was trained for.

    Raises:
        UsageError: files are missing or damaged, or do not match each other or ``model``.
    """
    try:
        with open_regular(description_path(path)) as opened:
            description = json.loads(opened.read().decode("utf-8"))
        with open_regular(path) as opened:
            check_npz(opened)
            with np.load(opened, allow_pickle=False) as file:
                parameters = file["parameters"]
                buffers = file["buffers"].tobytes() if "buffers" in file.files else b""
    except READ_ERRORS as error:
        raise UsageError(f"{path} is not a saved model ({error}); save() writes NAME and NAME.json"
                         ) from None  # fmt: skip
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise UsageError(
            f"{description_path(path)} does not state format {FORMAT}, which this version of "
            "sparkstrom reads: it does not describe a model, or a newer version wrote it"
        )
    _check_description(description_path(path), description)
    if model is None:
        model = _model_from_description(description_path(path), description["model"])
    elif warning := check_same_model(model.describe(), description["model"], path):
        log.warning(warning)
    if parameters.shape != (model.n_params,) or parameters.dtype != np.float32:
        raise UsageError(
            f"{path} holds {parameters.dtype}{list(parameters.shape)}, its description requires "
            f"float32[{model.n_params}]: the two files were not saved together"
        )
    if _parameters_digest(parameters, buffers) != description["sha256"]:
        raise UsageError(
            f"{path} does not hold the parameters that {description_path(path).name} describes: "
            "the two files were not saved together; use two that were"
        )
    load_buffers(model, buffers)
    return model, parameters, int(description["epochs"])


def _check_description(path: Path, description: dict[str, Any]) -> None:
    """Raise UsageError unless a description is complete and unchanged since ``save_model``."""
    if missing := REQUIRED_KEYS - set(description):
        raise UsageError(f"{path} lacks {', '.join(sorted(missing))}")
    if unknown := set(description) - REQUIRED_KEYS - OPTIONAL_KEYS:
        raise UsageError(f"{path} is damaged: it has {', '.join(map(repr, sorted(unknown)))}")
    digest = description.get(DESCRIPTION_DIGEST_KEY)
    epochs, model = description["epochs"], description["model"]
    if (
        (DESCRIPTION_DIGEST_KEY in description and digest != _description_digest(description))
        or not (isinstance(epochs, int) and epochs >= 0)
        or not isinstance(model, dict)
    ):
        raise UsageError(
            f"{path} is damaged or was changed after it was saved: take it from another copy, or"
            " save the model again; a model cannot be changed by editing this file"
        )


def _model_from_description(path: Path, description: dict[str, Any]) -> FlatModel:
    """Create a model from its description. Raise UsageError naming the file if that fails."""
    try:
        return from_description(description)
    except SparkstromError as error:
        raise UsageError(f"{path}: {error}") from error
    except Exception as error:  # a damaged file of an earlier version, without a digest
        raise UsageError(
            f"{path} describes a model that cannot be created ({type(error).__name__}:"
            f" {first_line(error)}): it is damaged, or of another version of sparkstrom"
        ) from error


def check_same_model(current: dict[str, Any], saved: dict[str, Any], path: object) -> str | None:
    """Raise UsageError if two models differ in kind, parameters or values of ``REFUSED_KEYS``.

    Return a warning if they differ in values of ``WARNED_KEYS``, otherwise None.

    Args:
        current: description of the model in this program.
        saved: description of the saved model.
        path: the saved file's name, for messages.
    """
    current = json.loads(json.dumps(current))  # tuples become lists, as in the saved description
    kind, saved_kind = current.get("kind"), saved.get("kind")  # a user-defined model may have none
    if kind != saved_kind and (kind, saved_kind) not in EQUAL_KINDS:
        raise UsageError(f"{path} is of kind {saved_kind!r}, the given model is {kind!r}")
    parameters = current.get("parameters", []), saved.get("parameters", [])
    for own, other in itertools.zip_longest(*parameters):
        if own != other:
            raise UsageError(
                f"{path} has parameter {other}, the given model has {own} in its place: create it "
                "with the same code as the saved one"
            )
    if difference := _find_difference_in(current, saved, REFUSED_KEYS.get(kind, ())):
        raise UsageError(
            f"{path} is of a model with {difference}: create it with the same code as the saved one"
        )
    if kind == "keras":
        current, saved = _simplify_keras(current, {}), _simplify_keras(saved, {})
    difference = _find_difference_in(current, saved, WARNED_KEYS.get(kind, ()))
    return None if difference is None else MODEL_DIFFERS.format(path=path, difference=difference)


def _find_difference_in(
    current: dict[str, Any], saved: dict[str, Any], keys: tuple[str, ...]
) -> str | None:
    """Return the first difference between two models' descriptions as text; None if there is none.

    Only the values of ``keys`` are compared. Keys that one description lacks are not compared,
    except ``OPTIONAL_PARTS``.
    """
    for key in keys:
        if key in OPTIONAL_PARTS or (key in current and key in saved):
            name = KEY_NAMES.get(key, key)
            if difference := _find_difference(current.get(key), saved.get(key), name):
                return difference
    return None


def _simplify_keras(value: Any, numbers: dict[str, int]) -> Any:
    """Return a part of a Keras configuration, reduced to what affects the network.

    Keys in ``KERAS_IGNORED``, the size of batches and names are left out; references to layers by
    name become numbers. ``numbers``: the numbers of the layers of the model that the part ``value``
    belongs to, by name.
    """
    if isinstance(value, list | tuple):
        return [_simplify_keras(each, numbers) for each in value]
    if not isinstance(value, dict):
        return value
    kept = {key: each for key, each in value.items() if key not in KERAS_IGNORED}
    if "class_name" in kept:
        kept.pop("name", None)
        config = kept.get("config")
        # The name of a DTypePolicy is its dtype.
        if isinstance(config, dict) and "Policy" not in str(kept["class_name"]):
            kept["config"] = {key: config[key] for key in config if key != "name"}
    if isinstance(shape := kept.get("batch_shape"), list | tuple):
        kept["batch_shape"] = [None, *shape[1:]]
    if "keras_history" in kept:
        kept.pop("shape", None)  # it follows from the layers and the inputs' shape
    if isinstance(layers := kept.get("layers"), list | tuple):
        named = [str(layer.get("name")) if isinstance(layer, dict) else "" for layer in layers]
        numbers = {name: number for number, name in enumerate(named)}
    return {
        key: _number_layers(each, numbers)
        if key in KERAS_REFERENCES
        else _simplify_keras(each, numbers)
        for key, each in kept.items()
    }


def _number_layers(value: Any, numbers: dict[str, int]) -> Any:
    """Return a reference to layers with their numbers (``numbers``, by name) in place of names."""
    if isinstance(value, list | tuple):
        return [_number_layers(each, numbers) for each in value]
    if isinstance(value, dict):  # of several inputs or outputs, by the user's names
        return {key: _number_layers(each, numbers) for key, each in value.items()}
    return numbers.get(value, value) if isinstance(value, str) else value


def _find_difference(own: Any, other: Any, name: str) -> str | None:
    """Return the first difference between two JSON values as text, or None if they are equal.

    ``own`` is of the model in this program, ``other`` of the saved one. ``name`` says in the text
    where the values are. ``TRAINING_KEYS`` and what differs between equal models are not compared.
    """
    if isinstance(own, dict) and isinstance(other, dict):
        keys = [key for key in own | other if str(key).lower() not in TRAINING_KEYS]
        # A later version may write keys whose default is None.
        pairs = [(own.get(key), other.get(key), f"{name}[{key!r}]") for key in keys]
    elif isinstance(own, list | tuple) and isinstance(other, list | tuple):
        both = itertools.zip_longest(own, other)
        pairs = [(*pair, f"{name}[{index}]") for index, pair in enumerate(both)]
    elif isinstance(own, str) and isinstance(other, str) and "\n" in own + other:
        lines: list[list[Any]] = [
            [line.strip() for line in text.splitlines()] for text in (own, other)
        ]
        numbered = enumerate(itertools.zip_longest(lines[0], lines[1]), 1)
        pairs = [(*pair, f"{name} (line {number})") for number, pair in numbered]
    elif _without_changing(own) == _without_changing(other):
        return None
    else:
        return f"{name}={shown(other)}, the given model has {shown(own)} in its place"
    return next((found for pair in pairs if (found := _find_difference(*pair))), None)


def _without_changing(value: Any) -> Any:
    """Return a value without the parts of a string that differ between equal models."""
    return CHANGING.sub("", value) if isinstance(value, str) else value


def _parameters_digest(parameters: Flat, buffers: bytes) -> str:
    """Return the SHA-256 of the parameters and buffers, in hexadecimal."""
    digest = hashlib.sha256(parameters.tobytes())
    digest.update(buffers)
    return digest.hexdigest()


def _description_digest(description: dict[str, Any]) -> str:
    """Return a SHA-256 of a description's values, independent of the layout of the JSON."""
    rest = {name: value for name, value in description.items() if name != DESCRIPTION_DIGEST_KEY}
    content = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()
