"""Controller copies: what a fit goes on from when the task of its controller is gone.

Checkpoints as any, in a folder of the driver program's own, of which the newest stays. They are
made while training goes on, cost at most a twentieth of its time, and never end it.
"""

from __future__ import annotations

import logging
import math
import time

from sparkstrom.base.errors import SparkstromError
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.runtime.fit_state import Progress
from sparkstrom.spark.driver.checkpoint_keeper import CheckpointKeeper

log = logging.getLogger(__name__)

EVERY = "10 s"  # what is trained again at most, where a copy is quick
SHARE = 20  # a copy that took a second is not followed by another one for so many


class ControllerCopies(CheckpointKeeper):
    """Of one fit whose controller is a task; without a connection to that there are none."""

    needs_live = ""  # it is no option of anybody's
    is_wanted = False
    _due_s = -math.inf

    def on_fit_begin(self, spec: FitSpec) -> None:
        super().on_fit_begin(spec)
        self._seen = 0  # copies whose time has been reckoned with

    def _tell_news(self) -> None:
        """Nobody hears of what goes with the fit."""

    def _look(self, progress: Progress) -> None:
        """A copy that cannot be had is left out, unless that is what ends the fit."""
        now_s = time.monotonic()
        for written in self._writer.written[self._seen :]:
            self._seen += 1
            self._due_s = now_s + SHARE * written.seconds
        if now_s < self._due_s or not self._master.reachable:
            return
        try:
            super()._look(progress)
        except SparkstromError as error:
            if self._master.failure is not None:
                raise
            log.warning("no copy of the controller's replica: %s", error)
