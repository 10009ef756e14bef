"""Rounds fit: one fit by synchronous rounds, made of its master, its processes and who follows."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from sparkstrom.codec.frames import KEY_BYTES
from sparkstrom.codec.states import encode_state
from sparkstrom.local.by_value import packed_by_value
from sparkstrom.local.fit_files import allocate_file, write_file
from sparkstrom.local.host_fit import Dealt, HostSite
from sparkstrom.local.host_way import HostJob
from sparkstrom.local.orders import WorkerOrder
from sparkstrom.local.rounds_master import NOWHERE, RoundsMaster
from sparkstrom.local.rounds_plan import RoundsPlan
from sparkstrom.local.rounds_session import (
    BUFFERS,
    F32,
    PARAMETERS,
    STATE,
    BeginRounds,
    own,
    parameters_in,
)
from sparkstrom.local.wrapper_options import RoundRule
from sparkstrom.observe.epochs import EpochBook
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.runtime.lent_state import LentStates, steps_in, updater_in
from sparkstrom.runtime.master_control import MasterControl
from sparkstrom.runtime.theta import Theta
from sparkstrom.spark.driver.epoch_watch import EpochWatch
from sparkstrom.spark.driver.fit_call import Showing
from sparkstrom.spark.driver.fit_listeners import FitEvents, FitListener
from sparkstrom.spark.driver.fit_progress import FitProgress
from sparkstrom.spark.driver.fit_site import TellingRun
from sparkstrom.spark.driver.fitting import Fitting


class RoundsFit(TellingRun):
    """``theta`` is what all begin a round with, then and afterwards; ``judged``: see ``Looks``."""

    sends_updates = False

    def __init__(
        self,
        site: HostSite,
        spec: FitSpec,
        theta: Theta,
        dealt: Dealt,
        rule: RoundRule,
        states: LentStates,
        *,
        judged: bool,
    ) -> None:
        self.spec, self.theta, self.states = spec, theta, states
        self.book = EpochBook(spec.first_epoch)
        self._prepare(dealt, {} if rule.averages_state else states.own)
        job = packed_by_value(
            HostJob(
                spec=spec,
                key=secrets.token_bytes(KEY_BYTES),
                model=site.model,
                master=site.master,
                k=theta.k,
                layers=None,
                endpoint=NOWHERE,
                join_stream=0,
                network=site.name,
            )
        )

        def begin(partition: int, attempt: int) -> WorkerOrder:
            place, rows = site.place(partition, attempt), dealt.files[partition]
            return BeginRounds(job, place, rows, str(dealt.directory))

        rounds = RoundsPlan(
            spec,
            site.model,
            rule.frequency,
            rule.averages_state,
            steps_in(states.one, spec.minibatches_before // spec.workers),
            rule.accumulator,
            dealt.directory,
            begin,
        )
        made = RoundsMaster(rounds, site.pool, theta, judged=judged)
        self.master: MasterControl = made
        self._job = RoundsJob(made)

    def _prepare(self, dealt: Dealt, own_states: Mapping[int, bytes]) -> None:
        """The files that processes share, as the fit begins."""
        directory, n_params = dealt.directory, self.theta.n_params
        allocate_file(directory / PARAMETERS, (1 + len(dealt.files)) * n_params * F32.itemsize)
        parameters_in(directory, n_params, writable=True)[0] = self.theta.to_host()
        if self.theta.buffers:
            write_file(directory / BUFFERS, self.theta.buffers)
        if self.states.one:
            write_file(directory / STATE, encode_state(updater_in(self.states.one)))
        for partition, state in own_states.items():
            write_file(directory / own(STATE, partition), encode_state(updater_in(state)))

    @property
    def states_after(self) -> LentStates:
        """The fit is over, so these are of its end."""
        self.master.snapshot(updaters=True)
        return LentStates.of(self.master.updater_copies)

    def run(self, showing: Showing, watch: EpochWatch, *others: FitListener) -> None:
        """To its end, good or bad; raise what ended it early."""
        ours = [watch, FitProgress(showing.progress), showing.record]
        self._events = FitEvents(self.spec, [*ours, *others], self.book)
        Fitting(self.master, self._job, self._events).run()


class RoundsJob:
    """The master's thread as the fit's job: the master's own ``start`` begins it."""

    error: Exception | None = None  # what fails there is the master's failure

    def __init__(self, master: RoundsMaster) -> None:
        self._master = master

    @property
    def reports(self) -> list[Any]:
        """Of partitions, in order, as JSON."""
        return self._master.reports

    @property
    def running(self) -> bool:
        return self._master.is_alive()

    def start(self) -> None:
        """It is at work already."""

    def cancel(self) -> None:
        """End it."""
        self._master.give_up("cancelled")

    def wait(self, seconds: float) -> bool:
        """Until it has ended; at most so long."""
        self._master.join(seconds)
        return not self._master.is_alive()

    def killed_for_memory(self) -> list[str]:
        """Nobody here says so."""
        return []
