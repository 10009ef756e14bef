"""Settings of ours: what a user may set, and what was tried; each by its name on the command line.

The defaults are those of a fit, as far as they are options there.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Self

from sparkstrom.encoding.residual import ResidualClipping
from sparkstrom.encoding.tau import WarmUp
from sparkstrom.encoding.thresholds import AUTO, AutoThreshold
from sparkstrom.options.gradient_sharing import STALENESS_TARGET


@dataclass(frozen=True, slots=True)
class Settings:
    """Of one variant."""

    horizon: str = "fit"  # whose minibatches momentum and statistics count; "worker": each its own
    beta2: str = "worker"  # the same for the second moments of Adam
    publish_every: int | str = AUTO  # steps; AUTO: when the last publication has arrived
    max_lead: int | str | None = AUTO
    max_staleness: int | str | None = AUTO  # steps that go on while an own update is under way
    latency: float = 0.1  # steps from a publication until everybody has it
    jitter: float = 0.1  # of a step, and of a worker
    step_s: float = 0.01  # real seconds of a step, for AutoThreshold
    density: float = 1e-2  # the most that AutoThreshold sends
    density_min: float = 1e-3
    levels: int = 4
    warm: int = 0  # publications of each worker that send more
    warm_first: float = 0.25  # of all parameters
    aggregation: str = "sum"  # or mean, sqrt; or "gain", see ``tricks``
    look_ahead: float = 0.0  # see ``tricks``
    average: float = 0.0  # share of the fit
    train_on: str = "local"
    clip: float | None = 5.0  # residuals are clipped at so many tau
    clip_every: int = 5  # publications
    clip_norm: float | None = None  # of gradients
    resumed: int = 0  # times that all residuals are lost, as where a fit goes on from a checkpoint

    def threshold(self) -> AutoThreshold:
        return AutoThreshold(min(self.density_min, self.density), self.density, self.levels)

    def clipping(self) -> ResidualClipping | None:
        return None if self.clip is None else ResidualClipping(self.clip, self.clip_every)

    def warm_up(self) -> WarmUp | None:
        return WarmUp(self.warm, self.warm_first, self.density) if self.warm else None

    def every(self) -> int:
        """Steps that a publication holds at least."""
        return 1 if isinstance(self.publish_every, str) else self.publish_every

    def lead(self) -> int | None:
        """Steps before the slowest."""
        return self.every() if isinstance(self.max_lead, str) else self.max_lead

    def beside(self, workers: int) -> int | None:
        """Steps beside an update that is under way."""
        if isinstance(self.max_staleness, str):
            return max(0, STALENESS_TARGET // workers - self.every())
        return None if self.max_staleness is None else self.max_staleness * self.every()

    def beta2_power(self, workers: int) -> int:
        """What the second beta is raised to."""
        return workers if self.beta2 == "fit" else 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """``name=value,name=value``; raises ValueError naming what is wrong."""
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
    return {"int": int, "float": float, "str": str}[kind.split(" ")[0]](text)
