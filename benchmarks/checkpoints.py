"""Time to write and read a checkpoint, compared with ``numpy.savez`` and with plain bytes.

    python -m benchmarks.checkpoints --params 25000000 --directory /tmp --json

The arrays are float32: the parameters, and two arrays of the same size for Adam. Whatever writes a
file ends with fsync. Figures are medians of ``--repeats`` runs of all ways in turn: wall-clock
seconds, and with ``_cpu_s`` the processor time of this process.

    plain     the arrays' bytes, one array after the other
    savez     numpy.savez, which computes a CRC-32 of all bytes
    write     CheckpointDirectory.write: CRC-32 and SHA-256 of all bytes, rename, fsync of the
              directory
    pack      the same without a file, which is the time for checksums
    read      the newest checkpoint, with both checks
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sparkstrom.checkpoint.directory import CheckpointDirectory
from sparkstrom.checkpoint.files import Checkpoint, write_checkpoint


class NullFile:
    """A file that discards what is written to it."""

    def write(self, data: Any) -> int:
        """Discard the data; return its length."""
        return len(data)


def make_functions(folder: Path, n_params: int) -> dict[str, Callable[[], object]]:
    """Return the functions to time, by name; they write and read below ``folder``."""
    random = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        name: random.random(n_params, np.float32) for name in ("parameters", "m", "v")
    }
    checkpoint = Checkpoint({"epoch": 1}, arrays)
    directory = CheckpointDirectory(folder / "checkpoints", 1)

    def plain() -> None:
        with (folder / "plain").open("wb") as file:
            for array in arrays.values():
                file.write(array.data)
            file.flush()
            os.fsync(file.fileno())

    def savez() -> None:
        with (folder / "savez").open("wb") as file:
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())

    def write() -> None:
        directory.write(checkpoint)
        directory.remove_old()

    return {
        "plain": plain,
        "savez": savez,
        "write": write,
        "pack": lambda: write_checkpoint(checkpoint, NullFile()),
        "read": lambda: directory.read_newest(print),
    }


def measure(folder: Path, n_params: int, repeats: int) -> dict[str, float]:
    """Return each function's median time in seconds, by the wall clock and of the processor."""
    taken: dict[str, list[float]] = {}
    timed = make_functions(folder, n_params)
    for _ in range(repeats):
        for name, run in timed.items():
            begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
            run()
            taken.setdefault(f"{name}_s", []).append(time.perf_counter() - begin_s)
            taken.setdefault(f"{name}_cpu_s", []).append(time.process_time() - begin_cpu_s)
    return {name: round(statistics.median(values), 3) for name, values in taken.items()}


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoints", description=__doc__)
    parser.add_argument("--params", type=int, default=25_000_000, help="parameters of the model")
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="where to write files")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each way")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.directory) as folder:
        figures = measure(Path(folder), given.params, given.repeats)
    if given.json:
        print(json.dumps(figures))
        return
    for name, seconds in figures.items():
        print(f"{name:14} {seconds:8.3f}")


if __name__ == "__main__":
    main()
