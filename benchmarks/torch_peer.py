"""Training of the same module on the same data by pyspark's TorchDistributor and by sparkstrom.

    python -m benchmarks.torch_peer --json

Two processes train on the digits: of TorchDistributor (local mode, gloo, DistributedDataParallel),
then of sparkstrom on a ``local-cluster``. Each call is in a new Spark session. One after the other,
the calls train for the numbers of epochs in ``--epochs``, until one of them reaches the accuracy
``--wanted`` on held-out rows.

    seconds      of a call until it returns, with the start of the processes
    seconds_to   the same of the call that reached the accuracy
    bytes        between workers: of sparkstrom, the payloads that workers sent; of TorchDistributor
                 computed: a ring all-reduce of P float32 values among N processes sends
                 2 (N - 1) 4 P bytes in all at each step
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from benchmarks.sessions import local_cluster

PROCESSES = 2
TRAIN_ROWS, BATCH_ROWS = 1437, 32


def make_module(seed: int) -> Any:
    """Return a small convolutional network."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)),
    )


def split_digits() -> tuple[Any, Any, Any, Any]:
    """Return features and labels to train on, then those held out."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    features, labels = (digits.data / 16).astype(np.float32), digits.target
    order = np.random.default_rng(0).permutation(len(labels))
    train, held_out = order[:TRAIN_ROWS], order[TRAIN_ROWS:]
    return features[train], labels[train], features[held_out], labels[held_out]


def train_in_process(features: Any, labels: Any, module: Any, epochs: int) -> Any:
    """Train as a user of TorchDistributor does, as in pyspark's documentation."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model = DistributedDataParallel(module)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loss_of = torch.nn.CrossEntropyLoss()
    data = TensorDataset(torch.from_numpy(features), torch.from_numpy(labels))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()
    return {name: value.numpy() for name, value in module.state_dict().items()}


def train_by_distributor(session: Any, rows: Any, module: Any, epochs: int) -> Any:
    """Train by TorchDistributor, and return the module."""
    import torch
    from pyspark.ml.torch.distributor import TorchDistributor

    distributor = TorchDistributor(num_processes=2, local_mode=True, use_gpu=False)
    state = distributor.run(train_in_process, *rows, module, epochs)
    module.load_state_dict({name: torch.from_numpy(value) for name, value in state.items()})
    return module


def train_by_sparkstrom(session: Any, rows: Any, module: Any, epochs: int) -> Any:
    """Train by sparkstrom; return the module, the summary and the network."""
    import torch

    from sparkstrom import AdaptiveThreshold, SharedTrainingMaster, SparkNetwork
    from sparkstrom.models.torch import TorchModel

    data = session.sparkContext.parallelize(list(zip(*rows, strict=True)), 2)
    optimizer = partial(torch.optim.Adam, lr=2e-3)
    model = TorchModel(module, torch.nn.CrossEntropyLoss(), optimizer)
    network = SparkNetwork(session, model, SharedTrainingMaster(threshold=AdaptiveThreshold(1e-3)))
    summary = network.fit(data, epochs=epochs)
    return network.module, summary, network


def main() -> int:
    """Print one object per system."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", default="4,8,12,16,24", help="of each call, by comma")
    parser.add_argument("--wanted", type=float, default=0.97, help="accuracy on held-out rows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    args = parser.parse_args()
    for name, call in (("TorchDistributor", call_distributor), ("sparkstrom", call_sparkstrom)):
        result = measure_system(name, call, args)
        print(json.dumps(result) if args.json else format_result(result), flush=True)
    return 0


@contextmanager
def fresh_session() -> Iterator[Any]:
    """Yield a session whose executors and Python workers run, but have not imported sparkstrom."""
    with local_cluster(PROCESSES) as session:
        session.sparkContext.parallelize(range(PROCESSES), PROCESSES).count()
        yield session


def call_distributor(
    session: Any, rows: Any, module: Any, epochs: int
) -> tuple[Any, dict[str, Any]]:
    """Call TorchDistributor once; return the module and the figures of the call."""
    began_s = time.monotonic()
    trained = train_by_distributor(session, rows, module, epochs)
    seconds = time.monotonic() - began_s
    n_params = sum(p.numel() for p in module.parameters())
    steps = epochs * math.ceil(math.ceil(len(rows[1]) / PROCESSES) / BATCH_ROWS)
    return trained, {"seconds": seconds, "bytes": 2 * (PROCESSES - 1) * 4 * n_params * steps}


def call_sparkstrom(
    session: Any, rows: Any, module: Any, epochs: int
) -> tuple[Any, dict[str, Any]]:
    """Call ``fit`` once; return the module and the figures of the call."""
    began_s = time.monotonic()
    trained, summary, network = train_by_sparkstrom(session, rows, module, epochs)
    seconds = time.monotonic() - began_s
    network.close()
    figures = {"seconds": seconds, "bytes": summary.bytes_sent, "bytes_wire": summary.bytes_wire}
    return trained, figures | {"replicas_equal": summary.replicas_equal}


def measure_system(name: str, call: Callable[..., Any], args: argparse.Namespace) -> dict[str, Any]:
    """Call a system with more and more epochs until the accuracy is reached; return the figures."""
    features, labels, held_out, answers = split_digits()
    calls = []
    for epochs in map(int, args.epochs.split(",")):
        with fresh_session() as session:
            rows, module = (features, labels), make_module(args.seed)
            module, figures = call(session, rows, module, epochs)
        accuracy = compute_accuracy(module, held_out, answers)
        calls.append({"epochs": epochs, "accuracy": round(accuracy, 4), **figures})
        if accuracy >= args.wanted:
            break
    reached = calls[-1]["accuracy"] >= args.wanted
    ours, theirs = [train_by_sparkstrom], [train_in_process, train_by_distributor]
    functions = ours if name == "sparkstrom" else theirs
    return {
        "system": name,
        "workers": PROCESSES,
        "wanted": args.wanted,
        "seconds_to": round(calls[-1]["seconds"], 2) if reached else None,
        **{key: calls[-1][key] for key in ("epochs", "accuracy", "bytes")},
        "lines": count_lines(*functions),
        "calls": calls,
    }


def compute_accuracy(module: Any, features: Any, labels: Any) -> float:
    """Return a module's accuracy on rows, in evaluation mode."""
    import torch

    module.eval()
    with torch.inference_mode():
        guesses = module(torch.from_numpy(features)).argmax(1).numpy()
    return float((guesses == labels).mean())


def count_lines(*functions: Callable[..., Any]) -> int:
    """Return the number of lines in the functions' bodies, without docstrings and empty lines."""
    count = 0
    for function in functions:
        body = inspect.getsource(function).splitlines()
        count += sum(bool(text.strip()) and '"""' not in text for text in body) - 1
    return count


def format_result(result: dict[str, Any]) -> str:
    """Return a result as text."""
    return (
        f"{result['system']}: {result['seconds_to']} s to {result['wanted']} in "
        f"{result['epochs']} epochs, accuracy {result['accuracy']:.4f}, {result['bytes']:,} bytes "
        f"between workers, {result['lines']} lines"
    )


if __name__ == "__main__":
    sys.exit(main())
