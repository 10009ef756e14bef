"""A saved model: ``NAME`` is an npz that plain NumPy opens, ``NAME.json`` says what it is."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from sparkstrom.base.errors import UsageError
from sparkstrom.base.version import __version__
from sparkstrom.models.base import Flat, FlatModel
from sparkstrom.models.registry import from_description

FORMAT = 1


def description_path(path: Path) -> Path:
    """Where the description of a saved model lies."""
    return path.with_name(path.name + ".json")


def save_model(path: Path, model: dict[str, Any], parameters: Flat, epochs: int) -> None:
    """Write both files; an interrupted save leaves the former ones as they were."""
    description = {
        "format": FORMAT,
        "sparkstrom": __version__,
        "model": model,
        "epochs": epochs,
        "n_params": int(parameters.size),
        "sha256": _digest(parameters),  # ties the two files: a crash between two renames shows
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        np.savez(file, parameters=parameters)
        _to_disk(file)
    words = description_path(path).with_name(f"{path.name}.{os.getpid()}.json.tmp")
    with words.open("w", encoding="utf-8") as text:
        json.dump(description, text, indent=2)
        _to_disk(text)
    temporary.replace(path)
    words.replace(description_path(path))


def load_model(path: Path) -> tuple[FlatModel, Flat, int]:
    """The model, its parameters f32[n_params] and the epochs it was trained for.

    Raises UsageError where the files are missing, or not of one model.
    """
    try:
        description = json.loads(description_path(path).read_text(encoding="utf-8"))
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            parameters = file["parameters"]
    except (OSError, EOFError, TypeError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise UsageError(f"{path} is no saved model ({error}); save() writes NAME and NAME.json"
                         ) from None  # fmt: skip
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise UsageError(
            f"{description_path(path)} does not say format {FORMAT}, which this version of "
            "sparkstrom reads: it is no description of a model, or of a newer version's"
        )
    if missing := {"model", "epochs", "sha256"} - set(description):
        raise UsageError(f"{description_path(path)} lacks {', '.join(sorted(missing))}")
    model = from_description(description["model"])
    if parameters.shape != (model.n_params,) or parameters.dtype != np.float32:
        raise UsageError(
            f"{path} holds {parameters.dtype}{list(parameters.shape)}, its description wants "
            f"float32[{model.n_params}]: the two files are not of one save"
        )
    if _digest(parameters) != description["sha256"]:
        raise UsageError(
            f"{path} does not hold the parameters that {description_path(path).name} describes: "
            "the two files are not of one save; take both from the same one"
        )
    return model, parameters, int(description["epochs"])


def _digest(parameters: Flat) -> str:
    return hashlib.sha256(parameters.tobytes()).hexdigest()


def _to_disk(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
