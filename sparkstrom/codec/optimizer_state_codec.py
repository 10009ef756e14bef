"""Encode and decode optimizer states (named arrays and plain scalars) as npz, without pickle."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import UsageError, WireError
from sparkstrom.base.untrusted_files import read_npz

Values = Mapping[str, "NDArray[Any] | float | int"]
SCALARS = "scalars"


def plain_scalars(state: Values) -> dict[str, Any]:
    """Return the state's values that are not arrays, with NumPy's numbers as Python's.

    Raise UsageError, naming the value, if one of them cannot be written as JSON.
    """
    plain = dict[str, Any]()
    for name, value in state.items():
        if isinstance(value, np.ndarray):
            continue
        plain[name] = value.item() if isinstance(value, np.generic) else value
        try:
            json.dumps(plain[name])
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"updater_state() of the model contains {name!r}, a {type(value).__name__}, which"
                " cannot be saved or sent: return arrays and numbers only"
            ) from error
    return plain


def encode_state(state: Values) -> bytes:
    """Return the state as bytes in NumPy's npz format. Names may be any text.

    Raise UsageError for a value that is neither an array nor can be written as JSON.
    """
    arrays = {f"/{k}": v for k, v in state.items() if isinstance(v, np.ndarray)}
    scalars = plain_scalars(state)
    file = io.BytesIO()
    np.savez(file, **{SCALARS: np.array(json.dumps(scalars))}, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def decode_state_untrusted(content: bytes) -> dict[str, NDArray[Any] | float | int]:
    """Decode what ``encode_state`` made. Raise WireError, and no other error, if it is invalid."""
    try:
        arrays = read_npz(io.BytesIO(content))
        state: dict[str, NDArray[Any] | float | int] = {
            name[1:]: array for name, array in arrays.items() if name.startswith("/")
        }
        state.update(json.loads(str(arrays[SCALARS])))
    except Exception as error:  # NumPy and zipfile may raise anything
        raise WireError(f"an updater's state that cannot be read: {error}") from None
    return state
