"""A trainer with a scripted channel in place of its node."""

from __future__ import annotations

import queue
from typing import Any

import numpy as np

from sparkstrom.base.clock import SystemClock
from sparkstrom.codec.messages import ResidualCheckpoint
from sparkstrom.data.row_store import Batches
from sparkstrom.encoding.encoder import Encoder
from sparkstrom.encoding.thresholds import FixedThreshold
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.events_and_effects import Command, Directive
from sparkstrom.runtime.optimizer_states import OptimizerStateServer
from sparkstrom.runtime.theta import Replica
from sparkstrom.runtime.trainer_thread import Trainer, TrainerChannel, TrainerOptions
from sparkstrom.runtime.training_loop import TrainerInbox, TrainerItem
from tests.unit.runtime.memories import backend, make_theta

K, N, TAU = 10, 300, 0.125
KEPT = ResidualCheckpoint("/there", 1.5)
END = Directive(Command.END, "done")
TRAIN = Directive(Command.TRAIN)

Script = list[tuple[list[TrainerItem], Directive]]


class ScriptedChannel(TrainerChannel):
    """A channel whose ``take`` returns the script's next line; ``wait`` returns at once."""

    def __init__(self, script: Script) -> None:
        super().__init__(TrainerInbox(0, make_theta(N, K).new_sum), wake=lambda: None)
        self.script = [*script, ([], END)]
        self.waits = 0

    def take(self) -> tuple[list[TrainerItem], Directive]:
        items, command = self.script.pop(0)
        self.publish([], command)
        return items, command

    def wait(self, seconds: float, known: Directive) -> None:
        self.waits += 1

    def posted(self) -> list[ev.Event]:
        """Remove and return all events that the trainer posted."""
        events = []
        while True:
            try:
                events.append(self.events.get_nowait())
            except queue.Empty:
                return events


class TrainerHarness:
    """A trainer on 10 rows, with minibatches of 4 and two epochs, and all that it needs."""

    def __init__(self, model: Any, script: Script, rows: int = 10, **schedule: Any) -> None:
        self.channel = ScriptedChannel(script)
        self.granted: list[tuple[str, ...]] = []
        self.model, self.lender = model, OptimizerStateServer(SystemClock())
        encoder = Encoder(N, K, FixedThreshold(TAU), backend=backend())
        self.replica = Replica(model, make_theta(N, K), encoder, local=True)
        features = np.arange(2 * rows, dtype=np.float32).reshape(rows, 2)
        batches = Batches(features, np.zeros(rows, np.int64), batch_rows=4, seed=0, partition=0)
        self.trainer = Trainer(
            self.channel,
            self.replica,
            batches,
            TrainerOptions(**({"epochs": 2, "publish_every": 1} | schedule)),
            save_residual=lambda replica: KEPT,
            add_residuals=lambda replica, paths: self.granted.append(paths),
            optimizer_server=self.lender,
        )

    def run(self) -> list[ev.Event]:
        """Train to the end of the script; return the events that the trainer posted."""
        assert self.trainer.run().reason == "done"
        return self.channel.posted()


def steps(count: int, command: Directive = TRAIN) -> Script:
    """Return a script of ``count`` lines with this directive and no items."""
    return [([], command)] * count
