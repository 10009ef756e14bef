"""Accuracy, bytes and seconds of fits on real executors, by number of workers and seed.

    python -m benchmarks.digits --workers 1,2,4 --seeds 3 --epochs 40 --json

All fits train on the same digits and are tested on the others; a seed chooses the initial
parameters and which worker gets which rows. Workers run on ``local-cluster``, two on an executor.
``seconds`` is the time from the call of ``fit`` to its summary; ``seconds_per_epoch`` is training
alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.sessions import local_cluster

TRAIN_ROWS = 1437


def main() -> int:
    """Print one line per run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", default="1,2,4", help="numbers of workers, by comma")
    parser.add_argument("--seeds", type=int, default=3, help="runs per number of workers")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--tau", type=float, help="initial tau of an AdaptiveThreshold")
    parser.add_argument("--max-lead", type=int, help="as in SharedTrainingMaster")
    parser.add_argument("--max-staleness", type=int, help="as in SharedTrainingMaster")
    parser.add_argument("--train-on", default="local", choices=["local", "replica"])
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    args = parser.parse_args()
    for workers in map(int, args.workers.split(",")):
        for result in run_seeds(workers, args):
            print(json.dumps(result) if args.json else format_result(result), flush=True)
    return 0


def run_seeds(workers: int, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train with all seeds in one Spark application, and yield the results."""
    with local_cluster(workers) as session:
        for seed in range(args.seeds):
            yield run_fit(session, workers, seed, args)


def run_fit(session: Any, workers: int, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Train once, and return the figures of the fit."""
    from sklearn.datasets import load_digits

    from sparkstrom import AdaptiveThreshold, SharedTrainingMaster, SparkNetwork
    from sparkstrom.models import DenseNetwork, Sgd

    digits = load_digits()
    features, labels = (digits.data / 16).astype(np.float32), digits.target
    order = np.random.default_rng(0).permutation(len(labels))
    train, held_out = order[:TRAIN_ROWS], order[TRAIN_ROWS:]
    rows = [(features[i], int(labels[i])) for i in train]
    given = {
        "threshold": None if args.tau is None else AdaptiveThreshold(args.tau),
        "max_lead": args.max_lead,
        "max_staleness": args.max_staleness,
    }
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    master = SharedTrainingMaster(rng_seed=seed, train_on=args.train_on, **options)
    model = DenseNetwork([64, 256, 256, 10], updater=Sgd(0.1), seed=seed)
    network = SparkNetwork(session, model, master, progress=False)
    summary = network.fit(session.sparkContext.parallelize(rows, workers), epochs=args.epochs)
    answers = network.predict(features[held_out]).argmax(1)
    network.close()
    return {
        "workers": workers,
        "seed": seed,
        "accuracy": float((answers == labels[held_out]).mean()),
        "bytes_sent": summary.bytes_sent,
        "bytes_dense": summary.bytes_dense,
        "replicas_equal": summary.replicas_equal,
        "seconds": round(summary.seconds, 3),
        "seconds_per_epoch": round(summary.phase_seconds["train"] / args.epochs, 4),
        "staleness_mean": round(summary.staleness_mean, 2),
        "phase_seconds": {name: round(s, 3) for name, s in summary.phase_seconds.items()},
    }


def format_result(result: dict[str, Any]) -> str:
    """Return a result as text."""
    ratio = result["bytes_dense"] / max(1, result["bytes_sent"])
    return (
        f"{result['workers']} workers, seed {result['seed']}: accuracy {result['accuracy']:.4f}, "
        f"{result['bytes_sent']:,} bytes ({ratio:.0f} x fewer than dense), "
        f"equal {result['replicas_equal']}, {result['seconds']:.1f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
