"""Controller losses: a fit whose controller's task dies goes on with another one, by itself.

Nothing of it has been delivered: so it goes on from the newest copy that the driver program has, a
checkpoint, in which each minibatch is once, and trains all others as if for the first time; where
there is none, it begins anew. The mesh of before has another key: what is left of it is a stranger.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from sparkstrom.base.errors import CheckpointDamaged, ControllerLost, SetupError
from sparkstrom.checkpoint.checkpoint_directory import CheckpointDirectory, open_checkpoint
from sparkstrom.runtime.lent_state import LentStates
from sparkstrom.runtime.master_control import MasterControl
from sparkstrom.spark.driver.averaging_master import TrainingMaster
from sparkstrom.spark.driver.checkpoint_content import Resumption, resumption_of
from sparkstrom.spark.driver.checkpoint_keeper import CheckpointKeeper, Kept
from sparkstrom.spark.driver.controller_choice import parse_controller
from sparkstrom.spark.driver.controller_copies import EVERY
from sparkstrom.spark.driver.fit_call import FitCall, Showing
from sparkstrom.spark.driver.fit_checkpoints import FitCheckpoints
from sparkstrom.spark.driver.training_master import SharedTrainingMaster

log = logging.getLogger(__name__)

GOES_ON = (
    "the controller was lost ({what}); the fit goes on with another one from a copy of {commit} "
    "commits: {again:,} minibatches are trained again, {kept:,} are not (loss {loss} of "
    "controller_restarts={most})"
)
BEGINS_ANEW = (
    "the controller was lost ({what}); the fit begins anew with another one, because this program "
    "has no copy yet: {again:,} minibatches are trained again (loss {loss} of "
    "controller_restarts={most})"
)
TOO_OFTEN = "{lost} It was loss {loss} of this fit, and controller_restarts={most}"


@dataclass(slots=True)
class ControllerLosses:
    """Of one fit. ``folder``: for copies, where nobody wants checkpoints."""

    master: TrainingMaster
    checkpoints: FitCheckpoints
    _showing: Showing
    folder: str

    @property
    def _most(self) -> int:
        if not isinstance(self.master, SharedTrainingMaster):
            return 0
        return self.master.void.controller_restarts

    @property
    def keeps_copies(self) -> bool:
        """Is there a controller that can be lost, and a fit that would go on?"""
        if not isinstance(self.master, SharedTrainingMaster):
            return False  # rounds have none
        return self._most > 0 and parse_controller(self.master.void.controller).apart

    def kept(self, call: FitCall, k: int, states: LentStates) -> Kept:
        """What is kept of a fit where its user wants no checkpoints."""
        directory = CheckpointDirectory(self.folder, 1)
        return self.checkpoints.kept_in(directory, EVERY, call.key, k, states)

    def next_call(
        self,
        lost: ControllerLost,
        call: FitCall,
        master: MasterControl,
        keeper: CheckpointKeeper | None,
    ) -> FitCall:
        """How it goes on: the same call where it begins as it did. Raise ``lost`` at the end."""
        record, most = self._showing.record, self._most
        record.loses(lost.what)
        log.warning("the controller was lost: %s", lost.what)
        loss = len(record.lost)
        if loss > most:
            again = TOO_OFTEN.format(lost=lost, loss=loss, most=most)
            raise ControllerLost(again if most else str(lost), lost.what) from lost
        copy = self._newest(keeper)
        goes_on = copy or call.goes_on
        kept = goes_on.minibatches if goes_on is not None else 0
        words = BEGINS_ANEW if copy is None else GOES_ON
        self._showing.warn(
            words.format(
                what=lost.what,
                commit=0 if copy is None else copy.commit,
                again=max(0, master.progress.minibatches - kept),
                kept=kept,
                loss=loss,
                most=most,
            )
        )
        return call if copy is None else replace(call, goes_on=copy)

    def _newest(self, keeper: CheckpointKeeper | None) -> Resumption | None:
        """Of this fit, as it has run since its controller was lost the last time."""
        if keeper is None or keeper.newest is None:
            return None
        try:
            path, checkpoint = open_checkpoint(keeper.newest, self._showing.progress.say)
        except (CheckpointDamaged, SetupError) as error:
            self._showing.warn(f"the newest copy of this fit is not used: {error}")
            return None
        return resumption_of(path, checkpoint, self.checkpoints.model)
