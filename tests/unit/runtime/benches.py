"""A trainer against a station that plays its node."""

from __future__ import annotations

import queue
from typing import Any

import numpy as np

from sparkstrom.codec.messages import (
    Kept,
)
from sparkstrom.encoding.encoder import Encoder
from sparkstrom.encoding.thresholds import FixedThreshold
from sparkstrom.protocol import events as ev
from sparkstrom.protocol.events import Command, Order
from sparkstrom.runtime.batches import Batches
from sparkstrom.runtime.inbox import Inbox, Item
from sparkstrom.runtime.lending import Lender
from sparkstrom.runtime.replica import Replica
from sparkstrom.runtime.station import Station
from sparkstrom.runtime.theta import Theta
from sparkstrom.runtime.trainer import Schedule, Trainer

K, N, TAU = 10, 300, 0.125
KEPT = Kept("/there", 1.5)
END = Command(Order.END, "done")
TRAIN = Command(Order.TRAIN)

Script = list[tuple[list[Item], Command]]


class Scripted(Station):
    """Plays one line of its script for each look of the trainer; waiting is at once over."""

    def __init__(self, script: Script) -> None:
        super().__init__(Inbox(N, 0, Theta(N, K).decode))
        self.script = [*script, ([], END)]
        self.waits = 0

    def take(self) -> tuple[list[Item], Command]:
        items, command = self.script.pop(0)
        self.publish([], command)
        return items, command

    def wait(self, seconds: float, known: Command) -> None:
        self.waits += 1

    def posted(self) -> list[ev.Event]:
        events = []
        while True:
            try:
                events.append(self.events.get_nowait())
            except queue.Empty:
                return events


class Bench:
    """A trainer on 10 rows, minibatches of 4, two epochs, with all it touches."""

    def __init__(self, model: Any, script: Script, rows: int = 10, **schedule: Any) -> None:
        self.station = Scripted(script)
        self.granted: list[tuple[str, ...]] = []
        self.model, self.lender = model, Lender()
        encoder = Encoder(N, K, FixedThreshold(TAU))
        self.replica = Replica(model, Theta(N, K), encoder, local=True)
        features = np.arange(2 * rows, dtype=np.float32).reshape(rows, 2)
        batches = Batches(features, np.zeros(rows, np.int64), batch_rows=4, seed=0, partition=0)
        self.trainer = Trainer(
            self.station,
            self.replica,
            batches,
            Schedule(**({"epochs": 2, "publish_every": 1} | schedule)),
            keep=lambda replica: KEPT,
            grant=lambda replica, paths: self.granted.append(paths),
            lender=self.lender,
        )

    def run(self) -> list[ev.Event]:
        assert self.trainer.run() == "done"
        return self.station.posted()


def steps(count: int, command: Command = TRAIN) -> Script:
    return [([], command)] * count
