"""The program of the other systems, on torch.distributed over gloo: one process on each host.

    python -m benchmarks.slow_link.peers RANK ADDRESS INTERFACE RECORD TRIAL...

Each system is as its authors or torch describe it: ``dense`` is DistributedDataParallel; ``fp16``
and ``powersgd`` are its hooks (fp16_compress_hook; PowerSGD of rank 2 with error feedback and warm
start, dense for the first two steps, the smallest number that torch allows); ``diloco`` averages
the drift of 10 steps and applies it with Nesterov momentum (0.7, 0.9); ``sparseloco`` sends 1.6 %
of the drift of 15 steps in two bits (see ``sparse``), with error feedback 0.95 and an outer step
of 1.

Rank 0 writes the record. Its training loop runs in a thread of its own: at the limit, rank 0
evaluates the copies of its parameters, and ends even in the middle of a step.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel

from benchmarks.slow_link import data, sparse
from benchmarks.slow_link.trial import BATCH_ROWS, Record, Trial

PORT = 29400
LOOK_S, LEAVE_S = 0.1, 1.0  # poll interval; time after the limit in which a step may still end
POWERSGD_RANK, POWERSGD_FIRST = 2, 2
# PowerSGD's hook waits in gloo's two threads, so that two buckets would wait forever.
ONE_BUCKET_MB = 1 << 20
DILOCO_STEPS, DILOCO_RATE, DILOCO_MOMENTUM = 10, 0.7, 0.9
SPARSELOCO_STEPS, SPARSELOCO_FEEDBACK, SPARSELOCO_RATE = 15, 0.95, 1.0

Flat = NDArray[np.float32]


class System(Protocol):
    """A system's training on one rank."""

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Train on a minibatch, and exchange what is due."""

    def shared(self) -> Flat:
        """Return a copy of the parameters that all ranks have in common."""


class Parallel:
    """DistributedDataParallel, with or without a hook."""

    def __init__(self, module: Any, trial: Trial, hook: str) -> None:
        cap_mb = ONE_BUCKET_MB if hook == "powersgd" else None
        self._module = DistributedDataParallel(module, bucket_cap_mb=cap_mb)
        if hook == "fp16":
            self._module.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif hook == "powersgd":
            state = powersgd.PowerSGDState(
                None, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=POWERSGD_FIRST
            )
            self._module.register_comm_hook(state, powersgd.powerSGD_hook)
        make_optimizer = data.make_optimizer_factory(trial.optimizer, trial.rate)
        self._optimizer = make_optimizer(module.parameters())

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Train one minibatch."""
        make_step(self._module, self._optimizer, x, y)

    def shared(self) -> Flat:
        """Return the parameters that all workers share."""
        return data.copy_parameters(self._module.module)


class Drifting:
    """A system whose ranks train independently, and share their drift every ``every`` steps."""

    def __init__(self, module: Any, trial: Trial, every: int) -> None:
        self._module, self._every, self._taken = module, every, 0
        make_optimizer = data.make_optimizer_factory(trial.optimizer, trial.rate)
        self._optimizer = make_optimizer(module.parameters())
        self._common = data.copy_parameters(module)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Train one minibatch; share the drift if it is due."""
        make_step(self._module, self._optimizer, x, y)
        self._taken += 1
        if self._taken % self._every == 0:
            self._outer(self._common - data.copy_parameters(self._module))
            data.load_parameters(self._module, self._common)

    def shared(self) -> Flat:
        """Return the parameters that all workers share, without the present drift."""
        return self._common.copy()

    def _outer(self, drift: Flat) -> None:
        raise NotImplementedError


class DiLoCo(Drifting):
    """DiLoCo (arXiv 2311.08105)."""

    def __init__(self, module: Any, trial: Trial) -> None:
        super().__init__(module, trial, DILOCO_STEPS)
        self._velocity = np.zeros_like(self._common)

    def _outer(self, drift: Flat) -> None:
        dist.all_reduce(torch.from_numpy(drift))
        drift /= dist.get_world_size()
        self._velocity *= np.float32(DILOCO_MOMENTUM)
        self._velocity += drift
        nesterov = drift + np.float32(DILOCO_MOMENTUM) * self._velocity
        self._common -= np.float32(DILOCO_RATE) * nesterov


class SparseLoCo(Drifting):
    """SparseLoCo (arXiv 2508.15706)."""

    def __init__(self, module: Any, trial: Trial) -> None:
        super().__init__(module, trial, SPARSELOCO_STEPS)
        self._unsent = np.zeros_like(self._common)

    def _outer(self, drift: Flat) -> None:
        self._unsent *= np.float32(SPARSELOCO_FEEDBACK)
        self._unsent += drift
        message = torch.from_numpy(sparse.encode(self._unsent))
        sparse.add_decoded(message.numpy(), self._unsent, -1.0)
        messages = [torch.empty_like(message) for _ in range(dist.get_world_size())]
        dist.all_gather(messages, message)
        for each in messages:
            factor = -SPARSELOCO_RATE / len(messages)
            sparse.add_decoded(each.numpy(), self._common, factor)


SYSTEMS: dict[str, Callable[[Any, Trial], System]] = {
    "dense": lambda module, trial: Parallel(module, trial, "none"),
    "fp16": lambda module, trial: Parallel(module, trial, "fp16"),
    "powersgd": lambda module, trial: Parallel(module, trial, "powersgd"),
    "diloco": DiLoCo,
    "sparseloco": SparseLoCo,
}


def make_step(module: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """Make one step of the inner optimizer."""
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(module(x), y).backward()
    optimizer.step()


def minibatches(trial: Trial, rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield a rank's minibatches, shuffled in each epoch, without an incomplete one at the end."""
    features, labels = data.make_worker_rows(trial.train_part, rank, trial.workers)
    random = np.random.default_rng((trial.seed, rank))
    for _ in range(trial.epochs):
        order = random.permutation(len(labels))
        for first in range(0, len(labels) - BATCH_ROWS + 1, BATCH_ROWS):
            rows = order[first : first + BATCH_ROWS]
            yield torch.from_numpy(features[rows]), torch.from_numpy(labels[rows])


def train(trial: Trial, rank: int, record: Record | None) -> None:
    """Make all steps of a trial; record them if a record is given."""
    system = SYSTEMS[trial.system](data.make_module(trial.widths, trial.seed), trial)
    batches = minibatches(trial, rank)
    dist.barrier()
    if record is not None:
        record.began(system.shared().size)
    taken = 0
    for x, y in batches:
        system.step(x, y)
        taken += 1
        if record is not None:
            record.event("stepped", minibatches=taken * trial.workers)
            if record.due:
                record.put_aside(system.shared(), taken * trial.workers)
            if record.over:
                break
    if record is not None:
        record.put_aside(system.shared(), taken * trial.workers)
        record.event("ended", minibatches=taken * trial.workers)


def train_watched(trial: Trial, record: Record) -> bool:
    """Train on rank 0 in a thread, then evaluate; return whether the thread still runs a step."""
    failure: list[BaseException] = []

    def run() -> None:
        try:
            train(trial, 0, record)
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive() and not record.over:
        thread.join(LOOK_S)
    thread.join(LEAVE_S)
    if failure:
        record.event("ended", error=f"{type(failure[0]).__name__}: {failure[0]}".splitlines()[0])
    elif thread.is_alive():
        record.event("stopped")
    record.evaluate()
    record.event("done")
    return thread.is_alive()


def main() -> int:
    """Run all trials, one after the other."""
    rank_text, address, interface, path, *texts = sys.argv[1:]
    rank, trials = int(rank_text), [Trial.parse(text) for text in texts]
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    torch.set_num_threads(1)
    workers = trials[0].workers
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address}:{PORT}", rank=rank, world_size=workers
    )
    for trial in trials:
        if rank == 0 and train_watched(trial, Record(Path(path), trial)):
            os._exit(0)  # the other ranks wait for this one, and end with their hosts
        if rank != 0:
            train(trial, rank, None)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
