"""Averaging run: one fit in rounds, made of its control, its Spark job and who follows it."""

from __future__ import annotations

from sparkstrom.observe.epochs import EpochBook
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.runtime.lent_state import LentStates
from sparkstrom.spark.averaging.common_state import AveragedParameters, CommonState
from sparkstrom.spark.averaging.round_job import AveragingJob, PieceSizes
from sparkstrom.spark.averaging.rounds_control import RoundsControl
from sparkstrom.spark.data.partitioning import Spread
from sparkstrom.spark.driver.averaging_master import ParameterAveragingTrainingMaster
from sparkstrom.spark.driver.epoch_watch import EpochWatch
from sparkstrom.spark.driver.fit_call import Showing
from sparkstrom.spark.driver.fit_listeners import FitEvents, FitListener
from sparkstrom.spark.driver.fit_progress import FitProgress
from sparkstrom.spark.driver.fit_site import TellingRun, TrainingSite
from sparkstrom.spark.driver.fitting import Fitting
from sparkstrom.spark.driver.learnt import Learnt

SIZES = PieceSizes()


class AveragingRun(TellingRun):
    """One fit that is about to begin; ``theta`` is what it has learnt, then and afterwards."""

    sends_updates = False

    def __init__(
        self,
        site: TrainingSite[ParameterAveragingTrainingMaster],
        spec: FitSpec,
        learnt: Learnt,
        spread: Spread,
        *,
        judged: bool,
    ) -> None:
        self._site, self.spec, self._spread = site, spec, spread
        _, self.states = learnt.use_up(spread.workers)
        steps = spec.minibatches_before // spread.workers
        common = CommonState(site.model, site.master, learnt.parameters, self.states, steps)
        self.book = EpochBook(spec.first_epoch)
        self.master = RoundsControl(spec, common, judged=judged)
        self.theta = AveragedParameters(common, learnt.exponent())

    @property
    def states_after(self) -> LentStates:
        """What a next fit goes on with."""
        if not self._site.keep:
            return LentStates()
        return LentStates.of(self.master.common.copies())

    def run(self, showing: Showing, watch: EpochWatch, *others: FitListener) -> None:
        """To its end, good or bad; raise what ended it early."""
        site = self._site
        job = AveragingJob(self.spec, site.model, site.master, self._spread.rows, SIZES)
        spark_job = site.application.rounds(job, self._spread, self.master)
        ours = [watch, FitProgress(showing.progress, worker_lines=showing.worker_lines)]
        self._events = FitEvents(self.spec, [*ours, showing.record, *others], self.book)
        Fitting(self.master, spark_job, self._events).run()
