"""ParallelWrapper compared with torch's DDP (gloo) on one machine, and the overhead per step (tax).

    python -m benchmarks.local --json

Each system trains the same module on the same rows (digits) with the same number of processes, 32
rows per minibatch and Adam at 2e-3.

    examples_per_s         trained rows per second of training, without the start of processes
    seconds_to             from the first step until the accuracy on held-out rows, measured after
                           each epoch, is at least ``--wanted``
    seconds_to_from_call   the same from the call on, with the start of processes

``tax`` compares the steps of a fit of one worker with the same steps in a plain loop. The model has
``--params`` parameters, and each step works for about ``--step-ms`` and changes all of them. All
values are medians of ``--repeats`` rounds.

    tax_ms, tax_percent    time from the end of a step of the fit to the begin of the next, also in
                           percent of a plain step
    tax_cpu_ms, tax_cpu_percent   processor time of the trainer's thread in between, also in percent
                           of that of a plain step; other programs on the machine affect it less
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.torch_peer import BATCH_ROWS, compute_accuracy, make_module, split_digits
from sparkstrom.models.base import Batch, Flat, State

LR = 2e-3
SYSTEMS = ("shared_gradients", "averaging", "ddp", "tax")


def main() -> int:
    """Print one line per system."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="systems, by comma")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--wanted", type=float, default=0.97, help="accuracy on held-out rows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--params", type=int, default=1_000_000, help="of tax: of the model")
    parser.add_argument("--step-ms", type=float, default=100.0, help="of tax: time of a step")
    parser.add_argument("--steps", type=int, default=60, help="of tax: steps in each round")
    parser.add_argument("--repeats", type=int, default=3, help="of tax: rounds")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    args = parser.parse_args()
    for system in args.systems.split(","):
        if system not in SYSTEMS:
            parser.error(f"--systems {system}: there are {', '.join(SYSTEMS)}")
        result = {"system": system} | run(system, args)
        print(json.dumps(result) if args.json else format_result(result), flush=True)
    return 0


def run(system: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run one system, and return its figures."""
    if system == "tax":
        return measure_tax(args)
    return train_with_ddp(args) if system == "ddp" else train_with_wrapper(system.upper(), args)


# -- ours ------------------------------------------------------------------------------------------


class AccuracyListener:
    """A listener that records when an accuracy on held-out rows is reached."""

    def __init__(self, wanted: float, held_out: Any, labels: Any) -> None:
        self._wanted, self._rows = wanted, (held_out, labels)
        self.at_s: float | None = None

    def on_epoch(self, event: Any) -> None:
        """Evaluate the driver's replica, until the accuracy is reached."""
        if self.at_s is None:
            found = event.evaluate(*self._rows, "classification").classification.accuracy
            self.at_s = time.monotonic() if found >= self._wanted else None


def train_with_wrapper(mode: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train with ParallelWrapper in a training mode, and return the figures."""
    import torch

    from sparkstrom import ParallelWrapper
    from sparkstrom.models.torch import TorchModel

    features, labels, held_out, answers = split_digits()
    optimizer = partial(torch.optim.Adam, lr=LR)
    model = TorchModel(make_module(args.seed), torch.nn.CrossEntropyLoss(), optimizer)
    listener, began_s = AccuracyListener(args.wanted, held_out, answers), time.monotonic()
    with ParallelWrapper(
        model, args.workers, training_mode=mode, batch_size_per_worker=BATCH_ROWS, progress=False
    ) as wrapper:
        summary = wrapper.fit((features, labels), args.epochs, listeners=[listener], run_log="")
        accuracy = compute_accuracy(wrapper.module, held_out, answers)
    start_s = summary.phase_seconds["prepare"] + summary.phase_seconds["start"]
    reached_s = None if listener.at_s is None else listener.at_s - began_s
    return make_figures(
        args, accuracy, summary.examples, summary.phase_seconds["train"], start_s, reached_s
    ) | {"replicas_equal": summary.replicas_equal, "bytes": summary.bytes_sent}


# -- the peer --------------------------------------------------------------------------------------


def train_with_ddp(args: argparse.Namespace) -> dict[str, Any]:
    """Train with torch's DistributedDataParallel over gloo, as in its tutorial."""
    import torch

    with tempfile.TemporaryDirectory() as directory:
        began_s = time.monotonic()
        given = (args.workers, args.epochs, args.wanted, args.seed, directory)
        torch.multiprocessing.spawn(run_ddp_process, given, nprocs=args.workers)
        result = json.loads((Path(directory) / "result").read_text())
    start_s = result["began_s"] - began_s
    reached_s = None if result["reached_s"] is None else result["reached_s"] - began_s
    return make_figures(
        args, result["accuracy"], result["examples"], result["seconds"], start_s, reached_s
    )


def run_ddp_process(
    rank: int, workers: int, epochs: int, wanted: float, seed: int, directory: str
) -> None:
    """Train as one process of DDP. Rank 0 measures the accuracy, whose time does not count."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{directory}/rendezvous", None, workers, rank)
    features, labels, held_out, answers = split_digits()
    module = make_module(seed)
    model = DistributedDataParallel(module)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    loss_of = torch.nn.CrossEntropyLoss()
    data = TensorDataset(torch.from_numpy(features), torch.from_numpy(labels))
    sampler = DistributedSampler(data, seed=seed)
    loader = DataLoader(data, batch_size=BATCH_ROWS, sampler=sampler)
    dist.barrier()
    began_s, evaluating_s, reached_s, examples = time.monotonic(), 0.0, None, 0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()
            examples += len(y) * workers
        if rank == 0 and reached_s is None:
            evaluation_began_s = time.monotonic()
            if compute_accuracy(module, held_out, answers) >= wanted:
                reached_s = evaluation_began_s - evaluating_s
            module.train()
            evaluating_s += time.monotonic() - evaluation_began_s
    dist.barrier()
    seconds = time.monotonic() - began_s - evaluating_s
    if rank == 0:
        result = {"began_s": began_s, "seconds": seconds, "reached_s": reached_s}
        result |= {"accuracy": compute_accuracy(module, held_out, answers), "examples": examples}
        (Path(directory) / "result").write_text(json.dumps(result))
    dist.destroy_process_group()


def make_figures(
    args: argparse.Namespace,
    accuracy: float,
    examples: int,
    train_s: float,
    start_s: float,
    reached_s: float | None,
) -> dict[str, Any]:
    """Return the figures that both systems have."""
    return {
        "workers": args.workers,
        "epochs": args.epochs,
        "accuracy": round(accuracy, 4),
        "examples_per_s": round(examples / train_s),
        "start_s": round(start_s, 2),
        "seconds_to": None if reached_s is None else round(reached_s - start_s, 2),
        "seconds_to_from_call": None if reached_s is None else round(reached_s, 2),
    }


# -- the tax ---------------------------------------------------------------------------------------


class StandInModel:
    """Parts of a model that a benchmark's steps do not need; subclasses bind and step."""

    n_params: int

    def initial(self) -> Flat:
        """Return zeros."""
        return np.zeros(self.n_params, np.float32)

    def predict(self, features: Any) -> Any:
        """Return zeros, f32[rows, 1]."""
        return np.zeros((len(features), 1), np.float32)

    def check(self, features: Any, labels: Any) -> None:
        """Accept all rows."""

    def updater_state(self) -> State:
        """Return {}: the model has no optimizer."""
        return {}

    def load_updater_state(self, state: State) -> None:
        """Do nothing."""

    def layer_of(self, index: int) -> str:
        """Return the name of the only layer."""
        return "all"

    def describe(self) -> dict[str, Any]:
        """Return the description for messages."""
        return {"kind": type(self).__name__}


class WorkingModel(StandInModel):
    """A model whose step multiplies matrices, then adds a fixed random vector to the parameters.

    Its loss is the time since the end of its last step in milliseconds, by a function of ``time``.
    """

    def __init__(self, n_params: int, products: int, clock: str = "thread_time") -> None:
        self.n_params, self._products, self._clock = n_params, products, clock
        self._params: Flat | None = None
        self._step: Flat | None = None
        self._matrix: Flat | None = None
        self._left_s: float | None = None  # when the last step ended

    def bind(self, params: Flat) -> None:
        """Train on these parameters; create the arrays that steps need."""
        chance = np.random.default_rng(1)
        self._params, self._left_s = params, None
        self._step = (1e-4 * chance.standard_normal(self.n_params)).astype(np.float32)
        self._matrix = chance.standard_normal((256, 256)).astype(np.float32) / 16

    def step(self, batch: Batch) -> float:
        """Do the same work each time; return the milliseconds since the end of the last step."""
        assert self._params is not None
        assert self._matrix is not None
        clock = getattr(time, self._clock)
        product, now_s = self._matrix, clock()
        between_s = 0.0 if self._left_s is None else now_s - self._left_s
        for _ in range(self._products):
            product = self._matrix @ product
            product /= np.abs(product).max()
        self._params += self._step
        self._left_s = clock()
        return 1000 * between_s


def measure_tax(args: argparse.Namespace) -> dict[str, Any]:
    """Return how much longer a step takes in a fit of one worker than in a plain loop."""
    products = count_products(args.step_ms)
    models = [
        WorkingModel(args.params, products, clock) for clock in ("perf_counter", "thread_time")
    ]
    rounds = []
    for _ in range(args.repeats):
        plain = measure_plain_step(models[0], args.steps)
        rounds.append((*plain, *(measure_gap_ms(model, args.steps) for model in models)))
    medians = (statistics.median(each) for each in zip(*rounds, strict=True))
    plain_ms, plain_cpu_ms, tax_ms, tax_cpu_ms = medians
    return {
        "params": args.params,
        "steps": args.steps,
        "plain_step_ms": round(plain_ms, 2),
        "tax_ms": round(tax_ms, 2),
        "tax_percent": round(100 * tax_ms / plain_ms, 2),
        "plain_cpu_ms": round(plain_cpu_ms, 2),
        "tax_cpu_ms": round(tax_cpu_ms, 3),
        "tax_cpu_percent": round(100 * tax_cpu_ms / plain_cpu_ms, 2),
        "rounds_ms": [[round(value, 2) for value in one] for one in rounds],
    }


def measure_gap_ms(model: WorkingModel, steps: int) -> float:
    """Train twice; return the milliseconds between the steps of the second fit."""
    from sparkstrom import ParallelWrapper

    rows = (np.zeros((steps, 1), np.float32), np.zeros(steps, int))
    with ParallelWrapper(model, 1, batch_size_per_worker=1, progress=False) as wrapper:
        wrapper.fit(rows, run_log="")  # starts the process, and loads kernels
        loss = wrapper.fit(rows, run_log="").history[-1].loss
    return loss * steps / (steps - 1)  # the first step has loss 0


def count_products(step_ms: float) -> int:
    """Return the number of matrix products that take about ``step_ms`` on this machine."""
    return max(1, round(50 * step_ms / measure_plain_step(WorkingModel(1, 50), 5)[1]))


def measure_plain_step(model: WorkingModel, steps: int) -> tuple[float, float]:
    """Return the milliseconds of a step in a plain loop: wall-clock time and processor time."""
    model.bind(model.initial())
    batch = Batch(np.zeros((1, 1), np.float32), np.zeros(1, int))
    model.step(batch)
    began = time.monotonic(), time.thread_time()
    for _ in range(steps):
        model.step(batch)
    ended = time.monotonic(), time.thread_time()
    return 1000 * (ended[0] - began[0]) / steps, 1000 * (ended[1] - began[1]) / steps


def format_result(result: dict[str, Any]) -> str:
    """Return a result as text."""
    if result["system"] == "tax":
        return (
            f"tax: {result['tax_ms']:.2f} ms per step of {result['plain_step_ms']:.1f} ms"
            f" ({result['tax_percent']:.2f} %); {result['tax_cpu_ms']:.2f} ms of processor time"
        )
    return (
        f"{result['system']}: {result['examples_per_s']:,} examples/s, accuracy"
        f" {result['accuracy']:.4f}, {result['seconds_to']} s to the wanted accuracy"
        f" ({result['seconds_to_from_call']} s with the start)"
    )


if __name__ == "__main__":
    sys.exit(main())
