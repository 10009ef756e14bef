"""States as bytes: named arrays and plain scalars in one npz, without pickle."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import WireError
from sparkstrom.base.files import check_npz

Values = Mapping[str, "NDArray[Any] | float | int"]
SCALARS = "scalars"


def encode_state(state: Values) -> bytes:
    """The state in the npz format; names are free."""
    arrays = {f"/{k}": v for k, v in state.items() if isinstance(v, np.ndarray)}
    scalars = {k: v for k, v in state.items() if not isinstance(v, np.ndarray)}
    file = io.BytesIO()
    np.savez(file, **{SCALARS: np.array(json.dumps(scalars))}, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def decode_state_untrusted(content: bytes) -> dict[str, NDArray[Any] | float | int]:
    """What ``encode_state`` wrote. Raise WireError and nothing else."""
    try:
        opened = io.BytesIO(content)
        check_npz(opened)
        with np.load(opened, allow_pickle=False) as file:
            state: dict[str, NDArray[Any] | float | int] = {
                name[1:]: file[name] for name in file.files if name.startswith("/")
            }
            state.update(json.loads(str(file[SCALARS])))
    except Exception as error:  # NumPy and zipfile raise what they like
        raise WireError(f"an updater's state that cannot be read: {error}") from None
    return state
