"""Settings of sparkstrom in this benchmark, by their names on the command line.

Most are options of a fit, with the same defaults.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Self

from benchmarks.convergence.tasks import BATCH_ROWS
from sparkstrom.encoding.residual import ResidualClipping
from sparkstrom.encoding.tau import WarmUp
from sparkstrom.encoding.thresholds import AUTO, AutoThreshold
from sparkstrom.options.gradient_sharing import SharedTrainingMaster


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one variant."""

    horizon: str | None = None  # momentum averages over minibatches of the "fit" or the "worker"
    scaling: str | None = None  # sequential, limited or ddp
    limit_overshoot: bool = True  # give updates less weight if their sums overshoot
    beta2: str = "worker"  # like ``horizon``, for the second moments of Adam
    publish_every: int | str = AUTO  # steps; AUTO: after the last publication has arrived
    max_lead: int | str | None = AUTO
    max_staleness: int | str | None = AUTO  # a worker's steps while its update is in flight
    latency: float = 0.1  # steps from a publication until every worker has it
    jitter: float = 0.1  # of a step: standard deviation over mean
    step_s: float = 0.1  # virtual seconds of a step
    # Largest density of AutoThreshold; if neither this nor ``levels`` is set, threshold="auto".
    density: float | None = None
    density_min: float = 1e-3  # with ``density`` or ``levels``
    levels: int | None = None  # of AutoThreshold; None: its default
    warm: int = 0  # first publications of each worker, which send more
    warm_first: float = 0.25  # sent fraction of the first publication
    aggregation: str | None = None  # or sum, mean, sqrt
    train_on: str = "local"
    clip: float | None = 5.0  # largest residual, in units of tau
    clip_every: int = 5  # publications
    clip_norm: float | None = None  # largest norm of a gradient

    def threshold(self) -> AutoThreshold | str:
        """Return the threshold algorithm that aims at this density, or "auto"."""
        if self.density is None and self.levels is None:
            return AUTO
        default = AutoThreshold()
        density = self.density or default.sent_fraction_max
        levels = self.levels or default.levels
        return AutoThreshold(min(self.density_min, density), density, levels)

    def clipping(self) -> ResidualClipping | None:
        """Return the residual clipping, or None."""
        return None if self.clip is None else ResidualClipping(self.clip, self.clip_every)

    def warm_up(self) -> WarmUp | None:
        """Return the warm-up of the density, or None."""
        if not self.warm:
            return None
        return WarmUp(self.warm, self.warm_first, self.density or AutoThreshold().sent_fraction_max)

    def master(self, seed: int) -> SharedTrainingMaster:
        """Return the options of a fit with these settings."""
        return SharedTrainingMaster(
            batch_size_per_worker=BATCH_ROWS,
            rng_seed=seed,
            threshold=self.threshold(),
            residual_post_processor=self.clipping(),
            warm_up=self.warm_up(),
            scaling=self.scaling,
            limit_overshoot=self.limit_overshoot,
            aggregation=self.aggregation,
            train_on=self.train_on,
            publish_every=self.publish_every,
            max_lead=self.max_lead,
            max_staleness=self.max_staleness,
            horizon=self.horizon,
        )

    def beta2_power(self, workers: int) -> int:
        """Return the power to which the second beta is raised."""
        return workers if self.beta2 == "fit" else 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``name=value,name=value``; raise ValueError if a name or value is wrong."""
        known = {each.name: each.type for each in fields(cls)}
        values: dict[str, Any] = {}
        for item in filter(None, text.split(",")):
            name, equals, value = item.partition("=")
            if name not in known or not equals:
                raise ValueError(f"{item!r}: must be NAME=VALUE with a name of {', '.join(known)}")
            values[name] = _value(str(known[name]), value)
        return cls(**values)


def _value(kind: str, text: str) -> Any:
    if "None" in kind and text.lower() == "none":
        return None
    if text == AUTO:
        return text
    if kind == "bool":
        if text not in ("True", "False"):
            raise ValueError(f"{text!r}: must be True or False")
        return text == "True"
    return {"int": int, "float": float, "str": str}[kind.split(" ")[0]](text)
