"""A saved model: ``NAME`` is an npz that plain NumPy opens, ``NAME.json`` says what it is.

A model of another library adds a file that this library opens by itself, such as ``NAME.pt``.

``NAME.json`` has two digests: of the parameters and buffers in ``NAME``, which ties the two files,
and of the rest of ``NAME.json`` itself. Files of earlier versions lack the second one.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from sparkstrom.base.errors import SetupError, SparkstromError, UsageError, first_line
from sparkstrom.base.files import check_npz, create_beside, open_regular
from sparkstrom.base.option_types import path_given
from sparkstrom.base.version import __version__
from sparkstrom.models.base import Buffered, Flat, FlatModel
from sparkstrom.models.registry import from_description

FORMAT = 1
OWN_DIGEST = "description_sha256"
NEEDED = {"format", "model", "epochs", "sha256"}
OPTIONAL = {"sparkstrom", "n_params", OWN_DIGEST}
DAMAGE = (
    *(OSError, EOFError, TypeError, ValueError, KeyError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error, struct.error),
)


def description_path(path: Path) -> Path:
    """Where the description of a saved model lies."""
    return path.with_name(path.name + ".json")


def local_path(path: str | os.PathLike[str]) -> Path:
    """The path. Raise UsageError for an address: it would become a folder of that name here."""
    given = path_given(path)
    if "://" in given:
        raise UsageError(
            f"{given} is an address, and models are saved as local files: save to a local"
            " path and copy NAME and what begins with NAME. there, or copy them here to load"
        )
    return Path(given)


def save_model(
    path: Path,
    model: dict[str, Any],
    parameters: Flat,
    epochs: int,
    *,
    buffers: bytes = b"",
    exported: tuple[str, bytes] | None = None,
) -> None:
    """Write the files; an interrupted save leaves the former ones as they were.

    ``buffers`` are arrays of the model that are no parameters; ``exported`` is a suffix and what
    the file with it holds.
    """
    description = {
        "format": FORMAT,
        "sparkstrom": __version__,
        "model": model,
        "epochs": epochs,
        "n_params": int(parameters.size),
        "sha256": _digest(parameters, buffers),  # ties the files: a crash between renames shows
    }
    description[OWN_DIGEST] = _digest_of_description(description)
    arrays = {"parameters": parameters}
    if buffers:
        arrays["buffers"] = np.frombuffer(buffers, np.uint8)
    npz = io.BytesIO()
    np.savez(npz, **arrays)  # type: ignore[arg-type]
    contents = {path: npz.getvalue(), description_path(path): _json(description)}
    if exported is not None:
        suffix, content = exported
        contents[path.with_name(path.name + suffix)] = content
    written: dict[Path, Path] = {}
    target = path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for target, content in contents.items():
            _write_beside(target, content, written)
        for target, temporary in written.items():
            temporary.replace(target)
    except OSError as error:
        for temporary in written.values():
            temporary.unlink(missing_ok=True)
        raise SetupError(
            f"{target} cannot be written ({error.strerror or error}): make room or give another"
            " path; what was saved there before is as it was"
        ) from error


def _json(description: dict[str, Any]) -> bytes:
    return json.dumps(description, indent=2).encode()


def _write_beside(target: Path, content: bytes, written: dict[Path, Path]) -> None:
    """Write the content to disk under a temporary name, which is put into ``written``."""
    created, written[target] = create_beside(target)
    with created as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def load_model(path: Path, model: FlatModel | None = None) -> tuple[FlatModel, Flat, int]:
    """The model, its parameters f32[n_params] and the epochs it was trained for.

    ``model``: one of the same code, where code cannot be described. Raises UsageError where the
    files are missing, not of one model, or not of this one.
    """
    try:
        with open_regular(description_path(path)) as opened:
            description = json.loads(opened.read().decode("utf-8"))
        with open_regular(path) as opened:
            check_npz(opened)
            with np.load(opened, allow_pickle=False) as file:
                parameters = file["parameters"]
                buffers = file["buffers"].tobytes() if "buffers" in file.files else b""
    except DAMAGE as error:
        raise UsageError(f"{path} is no saved model ({error}); save() writes NAME and NAME.json"
                         ) from None  # fmt: skip
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise UsageError(
            f"{description_path(path)} does not say format {FORMAT}, which this version of "
            "sparkstrom reads: it is no description of a model, or of a newer version's"
        )
    _check_description(description_path(path), description)
    if model is None:
        model = _described(description_path(path), description["model"])
    else:
        check_same(model.describe(), description["model"], path)
    if parameters.shape != (model.n_params,) or parameters.dtype != np.float32:
        raise UsageError(
            f"{path} holds {parameters.dtype}{list(parameters.shape)}, its description wants "
            f"float32[{model.n_params}]: the two files are not of one save"
        )
    if _digest(parameters, buffers) != description["sha256"]:
        raise UsageError(
            f"{path} does not hold the parameters that {description_path(path).name} describes: "
            "the two files are not of one save; take both from the same one"
        )
    if buffers and isinstance(model, Buffered):
        model.load_buffers_bytes(buffers)
    return model, parameters, int(description["epochs"])


def _check_description(path: Path, description: dict[str, Any]) -> None:
    """Raise UsageError where it is not what ``save_model`` wrote."""
    if missing := NEEDED - set(description):
        raise UsageError(f"{path} lacks {', '.join(sorted(missing))}")
    if unknown := set(description) - NEEDED - OPTIONAL:
        raise UsageError(f"{path} is damaged: it has {', '.join(map(repr, sorted(unknown)))}")
    digest = description.get(OWN_DIGEST)
    epochs, model = description["epochs"], description["model"]
    if (
        (OWN_DIGEST in description and digest != _digest_of_description(description))
        or not (isinstance(epochs, int) and epochs >= 0)
        or not isinstance(model, dict)
    ):
        raise UsageError(
            f"{path} is damaged or was changed after it was saved: take it from another copy, or"
            " save the model again; what a model is cannot be edited there"
        )


def _described(path: Path, description: dict[str, Any]) -> FlatModel:
    """Return the model. Raise UsageError where the description is of none."""
    try:
        return from_description(description)
    except SparkstromError as error:
        raise UsageError(f"{path}: {error}") from error
    except Exception as error:  # of an earlier version, without a digest, and damaged
        raise UsageError(
            f"{path} describes no model that can be made ({type(error).__name__}:"
            f" {first_line(error)}): it is damaged, or of another version of sparkstrom"
        ) from error


def check_same(here: dict[str, Any], saved: dict[str, Any], path: object) -> None:
    """Raise UsageError where the saved model is of another kind, or has other parameters."""
    ours, theirs = here.get("kind"), saved.get("kind")  # a model of one's own may say none
    if ours != theirs:
        raise UsageError(f"{path} is of kind {theirs!r}, the model given is {ours!r}")
    parameters = here.get("parameters", []), saved.get("parameters", [])
    for mine, other in itertools.zip_longest(*parameters):
        if mine != other:
            raise UsageError(
                f"{path} has parameter {other}, the model given has {mine} in its place: make it "
                "of the same code as the saved one"
            )


def _digest(parameters: Flat, buffers: bytes) -> str:
    digest = hashlib.sha256(parameters.tobytes())
    digest.update(buffers)
    return digest.hexdigest()


def _digest_of_description(description: dict[str, Any]) -> str:
    """Return the digest of all values, however the file is laid out."""
    rest = {name: value for name, value in description.items() if name != OWN_DIGEST}
    content = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()
