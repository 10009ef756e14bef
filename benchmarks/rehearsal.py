"""Minibatches that a rehearsal simulates per second, with the digits network.

    python -m benchmarks.rehearsal --workers 1,4,16 --epochs 100 --json

The minibatches of all runs are counted: one process, sparkstrom and DDP. Each run trains on the
same rows for the same epochs. ``digest`` is a hash of the parameters that sparkstrom's runs
deliver. It must be the same on a busy machine, and whether or not other processes simulate runs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time

import numpy as np


def main() -> None:
    """Rehearse, and print the figures on one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", default="1,4,16", help="numbers of workers, by comma")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args()

    from sklearn.datasets import load_digits

    from sparkstrom import ParallelWrapper
    from sparkstrom.models import Adam, DenseNetwork

    digits = load_digits()
    data = (digits.data / 16).astype(np.float32), digits.target
    model = DenseNetwork([64, 256, 256, 10], updater=Adam(1e-3), seed=0)
    workers = tuple(map(int, args.workers.split(",")))
    with ParallelWrapper(model, workers=2, progress=False) as wrapper:
        first = tuple(column[:320] for column in data)
        wrapper.rehearse(first, workers=1, step="3ms")  # compiles or loads the kernels
        began_s = time.perf_counter()
        made = wrapper.rehearse(data, workers=workers, epochs=args.epochs, step="3ms")
        seconds = time.perf_counter() - began_s
    minibatches = sum(run.minibatches for run in made.runs)
    found = {
        "workers": workers,
        "minibatches": minibatches,
        "seconds": round(seconds, 2),
        "minibatches_per_s": round(minibatches / seconds, 1),
        "digest": hashlib.sha256("".join(run.digest for run in made.runs).encode()).hexdigest(),
    }
    print(json.dumps(found) if args.json else found)


if __name__ == "__main__":
    main()
