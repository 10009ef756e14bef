"""Stand-in: what a LightningModule finds as ``self.trainer`` and ``self.log`` here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from sparkstrom.base.errors import UsageError
from sparkstrom.models.lightning.module_hooks import lightning_parts

TRAINING, VALIDATING, PREDICTING, CONFIGURING = "training", "validating", "predicting", ""

REMEDIES = {
    "estimated_stepping_batches": "give the module the number of minibatches of the fit",
    "max_epochs": "give the module the number that fit gets",
    "max_steps": "give the module the number of minibatches of the fit",
    "optimizers": "training_step leaves the optimizer alone (automatic optimization)",
    "strategy": "training_step leaves optimizer and scheduler alone (automatic optimization)",
    "lr_scheduler_configs": "the scheduler steps by itself",
    "datamodule": "rows come from fit(data)",
    "callback_metrics": "what is logged is not kept; fit's listeners hear of each epoch",
}


class StandIn:
    """In a Trainer's place: what Lightning's own code and users read most, and no more."""

    def __init__(self) -> None:
        self.current_epoch = 0  # of this worker, over all fits
        self.global_step = 0  # the fit's minibatches
        self.batch, self.num_training_batches = 0, 0  # of this worker's epoch
        self.logger: Any = None
        self.loggers: list[Any] = []
        self.sanity_checking = self.testing = False
        self.doing = CONFIGURING
        self.logged: dict[str, Any] = {}

    @property
    def training(self) -> bool:
        return self.doing == TRAINING

    @property
    def validating(self) -> bool:
        return self.doing == VALIDATING

    @property
    def predicting(self) -> bool:
        return self.doing == PREDICTING

    @property
    def is_last_batch(self) -> bool:
        return self.batch + 1 == self.num_training_batches

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        remedy = REMEDIES.get(name, "give the module what it needs when you make it")
        raise UsageError(f"self.trainer.{name}: no Trainer runs on Spark's executors; {remedy}")

    @contextlib.contextmanager
    def attached(self, module: nn.Module, doing: str) -> Iterator[None]:
        """While the module works, this is its trainer, and what it logs is kept here."""
        parts = [(part, part._trainer) for part in lightning_parts(module)]
        self.doing, self.logged = doing, {}
        for part, _ in parts:
            part._trainer = self
            part.__dict__["log"] = self._log
        try:
            yield
        finally:
            for part, before in parts:
                part._trainer = before
                del part.__dict__["log"]
            self.doing = CONFIGURING

    def _log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """A value of a minibatch; how it is shown is nobody's business here."""
        self.logged[name] = value

    def logged_number(self, name: str) -> float | None:
        """What was logged by this name; None: nothing. Raise UsageError for what is no number."""
        if name not in self.logged:
            return None
        value = self.logged[name]
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            return float(value)
        if isinstance(value, int | float):
            return float(value)
        raise UsageError(
            f"validation_step logs {name} as a {type(value).__name__}: log the mean over the rows"
            " of the minibatch as a number"
        )
