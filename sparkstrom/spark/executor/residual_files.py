"""Residual files: what a worker leaves on its executor's scratch for the next fit.

Residual, threshold state and the updater's state, in one npz with a JSON description; written
to a temporary file, flushed to disk, renamed. Where a file is granted, residuals add and the
states are taken over.
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import IO

import numpy as np

from sparkstrom.base.files import check_npz, open_regular
from sparkstrom.codec.messages import ResidualCheckpoint
from sparkstrom.models.base import State, without_frozen
from sparkstrom.runtime.replica import Replica

PREFIX = "sparkstrom-kept-"


def keep(replica: Replica, directory: Path, network: str) -> ResidualCheckpoint:
    """Write this replica's own state; return where and how much mass its residual has."""
    residual = replica.residual()
    arrays = {"residual": residual}
    scalars: dict[str, dict[str, float | int]] = {}
    encoder = replica.encoder.state()
    encoder.pop("residual", None)  # it is in the file already
    for part, state in (("encoder", encoder), ("updater", replica.model.updater_state())):
        scalars[part] = {}
        for name, value in state.items():
            if isinstance(value, np.ndarray):
                arrays[f"{part}/{name}"] = value
            else:
                scalars[part][name] = value
    path = directory / f"{PREFIX}{network}-{os.getpid()}-{secrets.token_hex(6)}.npz"
    temporary = path.with_suffix(".tmp")
    with temporary.open("xb") as file:
        np.savez(file, description=np.array(json.dumps(scalars)), **arrays)  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    return ResidualCheckpoint(str(path), float(np.abs(residual.astype(np.float64)).sum()))


def restore(replica: Replica, path: str) -> None:
    """Add a granted file to this replica, and remove it: it is granted once in all."""
    with open_regular(path, follow=False) as opened:
        check_npz(opened)
        _take(replica, opened)
    Path(path).unlink()


def _take(replica: Replica, opened: IO[bytes]) -> None:
    with np.load(opened, allow_pickle=False) as file:
        scalars = json.loads(str(file["description"]))
        states: dict[str, State] = {part: dict(values) for part, values in scalars.items()}
        for name in file.files:
            part, _, key = name.partition("/")
            if key:
                states[part][key] = file[name]
        replica.add_residual(without_frozen(replica.model, file["residual"]))
    replica.encoder.load_state(states["encoder"])
    replica.model.load_updater_state(states["updater"])


def forget(directory: Path, network: str) -> int:
    """Remove what was kept here for a network; return how many files."""
    files = list(directory.glob(f"{PREFIX}{network}-*"))
    for file in files:
        file.unlink(missing_ok=True)
    return len(files)
