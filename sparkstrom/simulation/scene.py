"""Scene: what others may see of a world: whoever acts on it, or checks it, is not part of it."""

from __future__ import annotations

from typing import Protocol

from sparkstrom.codec.messages import Phase
from sparkstrom.protocol.master.master import Master
from sparkstrom.simulation.run_sizes import Size
from sparkstrom.simulation.shape import Shape
from sparkstrom.simulation.sim_process import SimProcess
from sparkstrom.simulation.timeline import Timeline


class Scene(Protocol):
    """A run that goes on."""

    size: Size
    time: Timeline
    master: Master
    shape: Shape

    @property
    def phase(self) -> Phase:
        """Of the fit."""

    @property
    def alive(self) -> list[SimProcess]:
        """Processes that have neither ended nor been killed."""
