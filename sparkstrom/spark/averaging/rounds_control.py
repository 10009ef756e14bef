"""Rounds control: what the driver's main thread asks of a fit in rounds, whose own thread goes on.

It is the master that such a fit has (``runtime.master_control``): it numbers rounds where another
one numbers updates, and tells of workers what a mesh would.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from sparkstrom.base.errors import SparkstromError
from sparkstrom.base.identity import Endpoint, NodeId, Position
from sparkstrom.codec.messages import Phase, Says
from sparkstrom.models.base import Flat, State
from sparkstrom.observe.epochs import EpochLog, Finished
from sparkstrom.observe.telemetry import NO_BYTES, NodeCounters, TrainingCounters, WorkerCounters
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.protocol.master.members import Departure
from sparkstrom.protocol.master.partitions import Partitions
from sparkstrom.runtime.fit_state import Outcome, Progress, Snapshot
from sparkstrom.runtime.heard_lines import HeardLines
from sparkstrom.runtime.looks import Looks
from sparkstrom.runtime.traffic import Traffic
from sparkstrom.spark.averaging.common_state import CommonState, HeldStates
from sparkstrom.spark.averaging.round_job import Measure, RoundReport, RowFacts

TRIED_AGAIN = "Spark began its task again ({} times)"
UP, DOWN = "averages", "parameters"  # kinds of bytes


class WorkerTally:
    """What one worker has done in all rounds."""

    def __init__(self, partition: int) -> None:
        self.log = EpochLog(partition)
        self.steps = self.examples = self.rounds = self.sent_bytes = 0
        self.loss_sum = self._epoch_loss = self.last_loss = 0.0
        self._epoch_examples = self.last_examples = 0
        self.seconds: dict[str, float] = {}
        self.host, self.facts = "", RowFacts(partition, 0, 0, 0, 0, 0)

    def add(self, report: RoundReport) -> None:
        """A round."""
        self.host = report.host
        self.steps += report.steps
        self.examples += report.examples
        self.loss_sum += report.loss_sum
        self._epoch_loss += report.loss_sum
        self._epoch_examples += report.examples
        self.rounds += report.steps > 0
        self.sent_bytes += report.sent_bytes
        for what, seconds in report.seconds.items():
            self.seconds[what] = self.seconds.get(what, 0.0) + seconds

    def end_epoch(self, epoch: int, measure: Measure | None) -> None:
        """With what was measured then, if anything was held out."""
        self.last_loss, self._epoch_loss = self._epoch_loss, 0.0
        self.last_examples, self._epoch_examples = self._epoch_examples, 0
        held = (measure.total, measure.weight) if measure else (0.0, 0.0)
        self.log.add(Finished(epoch, self.last_loss, self.last_examples, *held))
        if measure is not None:
            spent = self.seconds.get("measuring", 0.0)
            self.seconds["measuring"] = spent + measure.seconds

    def counters(self, epoch: int, n_params: int) -> WorkerCounters:
        """As workers of a mesh tell them: each round is a publication of everything."""
        training = TrainingCounters(
            partition=self.facts.partition,
            epoch=epoch,
            steps=self.steps,
            examples=self.examples,
            loss_sum=self.loss_sum,
            last_loss_sum=self.last_loss,
            last_examples=self.last_examples,
            rows_held_out=self.facts.held_out,
            spilled_bytes=self.facts.spilled_bytes,
            publications=self.rounds,
            hits=self.rounds * n_params,
            seconds=dict(self.seconds),
            epochs=self.log.figures(),
        )
        return WorkerCounters(training, NodeCounters(update_bytes=self.sent_bytes))


class RoundsControl:
    """Of one fit. ``judged``: see ``runtime.looks``."""

    settles = False
    knows_theta = reachable = True
    endpoint, join_stream = Endpoint("", 0), 0  # nobody joins

    def __init__(self, spec: FitSpec, common: CommonState, *, judged: bool) -> None:
        self.spec, self.common = spec, common
        self.finished = threading.Event()
        self.failure: SparkstromError | None = None
        self.stop_reason: str | None = None
        self.given_up = False
        self.partitions = Partitions.of(spec, time.monotonic())
        self.traffic = Traffic()
        self._looks = Looks(judged=judged)
        self._there = threading.RLock()
        self._tallies = {index: WorkerTally(index) for index in range(spec.workers)}
        self._executors: set[str] = set()
        self._departures: list[Departure] = []
        self._heard = HeardLines()
        self._phase, self._began_s = Phase.GATHERING, dict[Phase, float]()
        self._held: HeldStates | None = None  # as of the newest snapshot that is to have them
        self._ended = dict[int, Position]()  # with an epoch whose figures nobody has looked at
        self._unchanged = common.parameters
        self._progress = self._look()

    # -- for the driver's main thread --------------------------------------------------------------

    @property
    def progress(self) -> Progress:
        """The newest look. Who asks again has done what followed from the one before.

        An epoch is behind the partitions from the look on that has its figures: a checkpoint has
        both, or goes on with measuring.
        """
        with self._there:
            self._leave_epoch()
        self._looks.add()
        with self._there:
            return self._progress

    def start(self) -> None:
        """Rounds begin with the Spark job's thread."""

    def request_stop(self, reason: str) -> None:
        """After the round that is under way."""
        with self._there:
            self.stop_reason = self.stop_reason or reason

    def give_up(self, reason: str) -> None:
        """No further round."""
        self.given_up = True
        self._looks.end()

    def snapshot(self, *, updaters: bool = False) -> Snapshot:
        """A copy, as of the newest round; ``updaters``: optimizers' states of it are set aside."""
        with self._there:
            if updaters:
                self._held = self.common.held()
            starts = tuple(partition.as_start() for partition in self.partitions)
            copied = self.common.parameters.copy()
            return Snapshot(self.common.rounds, copied, self.common.buffers, starts)

    def copy_updaters(self, *, everybody: bool) -> Future[tuple[bytes, ...]]:
        """Those that are set aside, encoded in the thread that asks: rounds go on meanwhile."""
        done: Future[tuple[bytes, ...]] = Future()
        held, self._held = self._held, None
        done.set_result(() if held is None else held.encoded(everybody=everybody))
        return done

    @property
    def updater_copies(self) -> tuple[bytes, ...]:
        """Those that are set aside."""
        return () if self._held is None else self._held.encoded()

    def end(self) -> None:
        """Its thread is the Spark job's."""

    def outcome(self) -> Outcome:
        """Of a fit that is done."""
        common, partitions = self.common, self.partitions
        changed = common.parameters is not self._unchanged
        changed = changed and bool((common.parameters != self._unchanged).any())
        stats = self._stats(self.spec.n_params if changed else 0)
        return Outcome(
            hashes={"driver": common.digest()},
            minibatches=partitions.minibatches,
            minibatches_expected=partitions.minibatches_expected,
            rows=[partition.rows for partition in partitions],
            executors=set(self._executors),
            commits=common.rounds,
            staleness=Counter(),
            staleness_minibatches=0.0,
            staleness_minibatches_max=0.0,
            stats=stats,
            traffic=self.traffic,
            wire=NO_BYTES,
            ignored=Counter(),
            hosts={node: self._tallies[node - 1].host for node in stats},
            slow_links=(),
            departures=list(self._departures),
            notes=[],
            kept={},
            lost_mass=0.0,
            grants=0,
            phase_began_s=dict(self._began_s),
            overflows=0,
            first_overflow=-1,
            stop_reason=self.stop_reason,
            minibatches_resumed=partitions.minibatches_resumed,
        )

    # -- for the thread of the rounds --------------------------------------------------------------

    @property
    def goes_on(self) -> bool:
        """Does anybody want another round?"""
        return self.stop_reason is None and not self.given_up

    def begin(self, facts: Sequence[RowFacts]) -> None:
        """The rows are known."""
        with self._there:
            for one in facts:
                self._tallies[one.partition].facts = one
                self._tallies[one.partition].host = one.host
            self._enter(Phase.RUNNING)

    def advance(
        self,
        mean: Flat,
        reports: Sequence[RoundReport],
        sums: Mapping[str, State],
        ends: Mapping[int, Position],
    ) -> None:
        """A round is done; ``ends``: how far each partition is."""
        with self._there:
            self.common.advance(mean, reports, sums)
            for report in reports:
                self._count(report)
            for index, position in ends.items():
                self.partitions[index].advance(position)
            self._progress = self._look()

    def hear(self, reports: Sequence[RoundReport | Measure]) -> None:
        """What their models printed, whatever else there is to tell."""
        with self._there:
            for one in reports:
                lines, skipped = one.lines, one.skipped
                said = Says(host=one.host, partition=one.partition, lines=lines, skipped=skipped)
                self._heard.take(said, time.monotonic())
            self._progress = self._look()

    def _count(self, report: RoundReport) -> None:
        now_s, index = time.monotonic(), report.partition
        self._tallies[index].add(report)
        self._executors.add(report.executor)
        self.traffic.by_kind[UP] += report.sent_bytes
        if report.attempt:
            why = TRIED_AGAIN.format(report.attempt)
            self._departures.append(Departure(NodeId(index + 1), index, report.host, why, now_s))

    def skip(self, ends: Mapping[int, Position]) -> None:
        """Nobody had a minibatch of any weight in this round."""
        with self._there:
            for index, position in ends.items():
                self.partitions[index].advance(position)

    def end_epoch(self, epoch: int, measures: Mapping[int, Measure]) -> None:
        """Of this fit; who judges it has its say before anything else happens."""
        with self._there:
            for index, tally in self._tallies.items():
                if tally.facts.rows or tally.facts.held_out:
                    tally.end_epoch(epoch, measures.get(index))
                if tally.facts.rows:
                    self._ended[index] = Position(epoch + 1, 0)
            self._progress = self._look()
        self._looks.await_judgement()

    def _leave_epoch(self) -> None:
        for index, position in self._ended.items():
            self.partitions[index].advance(position)
        self._ended.clear()

    def _enter(self, phase: Phase) -> None:
        self._phase, self._began_s[phase] = phase, time.monotonic()
        self._progress = self._look()

    def fail(self, error: SparkstromError) -> None:
        """``fit`` raises it."""
        self.failure = error
        self.finished.set()

    def finish(self) -> list[str]:
        """All rounds are done; return the workers' last words."""
        with self._there:
            self._leave_epoch()
            for phase in (Phase.DRAINING, Phase.AUDIT, Phase.DONE):
                self._enter(phase)
        self.finished.set()
        return [
            json.dumps({"epochs": tally.log.report(), "mass_dismissed": 0.0})
            for tally in self._tallies.values()
            if tally.facts.rows or tally.facts.held_out
        ]

    def _stats(self, n_params: int) -> dict[int, WorkerCounters]:
        return {
            index + 1: tally.counters(self.partitions[index].position.epoch, n_params)
            for index, tally in self._tallies.items()
            if tally.host
        }

    def _look(self) -> Progress:
        partitions, spec = self.partitions, self.spec
        here = frozenset(i for i, tally in self._tallies.items() if tally.facts.rows)
        runs = self._phase is not Phase.GATHERING
        return Progress(
            phase=self._phase,
            workers=spec.workers if runs else 0,
            partitions=spec.workers,
            joined=spec.workers if runs else 0,
            minibatches=partitions.minibatches,
            minibatches_expected=partitions.minibatches_expected,
            commits=self.common.rounds,
            staleness=0.0,
            stats=self._stats(spec.n_params),
            training=here if self._phase is not Phase.DONE else frozenset(),
            departures=tuple(self._departures),
            by_kind=Counter(self.traffic.by_kind),
            copied=spec.workers if runs else 0,
            heard=self._heard.lines,
            unheard=self._heard.skipped,
        )
