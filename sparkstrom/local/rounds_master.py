"""Rounds master: synchronous rounds, after each of which all workers have the same parameters.

It asks the processes itself, round by round; there is no mesh. A partition's minibatches count when
its answer is here. Who ends before that is replaced, and the other one begins the round anew.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from sparkstrom.base.errors import SparkstromError, TrainingError, UsageError
from sparkstrom.base.identity import Endpoint, NodeId, Position
from sparkstrom.codec.messages import Phase, Says
from sparkstrom.codec.states import decode_state_untrusted, encode_state
from sparkstrom.local.accumulators import accumulated
from sparkstrom.local.fit_files import write_file
from sparkstrom.local.orders import HOST, WorkerOrder
from sparkstrom.local.rounds_plan import RoundsPlan, RoundsTold
from sparkstrom.local.rounds_session import (
    BUFFERS,
    STATE,
    EndEpoch,
    EndRounds,
    TrainRound,
    left,
    own,
    parameters_in,
)
from sparkstrom.local.worker_pool import WorkerPool
from sparkstrom.local.workers_at_work import WorkersAtWork
from sparkstrom.models.base import Buffered
from sparkstrom.observe.telemetry import NO_BYTES, from_wire
from sparkstrom.protocol.master.members import Departure
from sparkstrom.protocol.master.partitions import Partition, Partitions
from sparkstrom.protocol.master.phases import NO_ROWS
from sparkstrom.runtime.averaging import (
    averaged,
    averaged_buffers,
    averaged_states,
    need_finite,
)
from sparkstrom.runtime.fit_state import Outcome, Progress, Snapshot
from sparkstrom.runtime.lent_state import PARTITION, STEPS, UPDATER
from sparkstrom.runtime.looks import Looks
from sparkstrom.runtime.theta import Theta
from sparkstrom.runtime.traffic import Traffic

log = logging.getLogger(__name__)

NOWHERE = Endpoint("127.0.0.1", 0)  # nobody joins over a network


class RoundsMaster(threading.Thread):
    """As ``runtime.master_control`` has it; its thread is the fit's job, too."""

    endpoint, join_stream = NOWHERE, 0
    settles = False
    knows_theta = reachable = True

    def __init__(self, rounds: RoundsPlan, pool: WorkerPool, theta: Theta, *, judged: bool) -> None:
        """``judged``: see ``runtime.looks``."""
        super().__init__(name="sparkstrom-rounds", daemon=True)
        self._rounds, self._theta = rounds, theta
        self._workers = WorkersAtWork(pool)
        self._shared = parameters_in(rounds.directory, theta.n_params, writable=True)
        self._partitions = Partitions.of(rounds.spec, time.monotonic())
        self._nodes = list(range(1, rounds.spec.workers + 1))  # by partition, the newest
        self._epochs_whole = min(partition.position.epoch for partition in self._partitions)
        self._steps = rounds.steps_before
        self._measure_only: set[int] = set()  # partitions all of whose rows are held out
        self._copies: tuple[bytes, ...] = ()  # of optimizers' states, set aside for who asks next
        self._told, self._phase, self._count = RoundsTold(), Phase.GATHERING, 0
        self._lock = threading.Lock()  # theta and the partitions' positions change together
        self._stop_reason: str | None = None
        self._cancelled = threading.Event()
        self.finished = threading.Event()
        self.failure: SparkstromError | None = None
        self.reports: list[Any] = []
        self._looks, self._progress = Looks(judged=judged), self._look()

    # -- for the main thread: master control -----------------------------------------------------

    @property
    def progress(self) -> Progress:
        """The newest look. Who asks again has done what followed from the one before."""
        self._looks.add()
        return self._progress

    def request_stop(self, reason: str) -> None:
        """After this round."""
        self._stop_reason = self._stop_reason or reason

    def give_up(self, reason: str) -> None:
        """At once."""
        self._cancelled.set()
        self._looks.end()

    def end(self) -> None:
        """Wait for the thread."""
        if self.is_alive():
            self.join()

    def snapshot(self, *, updaters: bool = False) -> Snapshot:
        """As of the newest round; ``updaters``: optimizers' states of it are set aside."""
        with self._lock:
            if updaters:
                self._copies = self._states()
            starts = tuple(partition.as_start() for partition in self._partitions)
            theta = self._theta
            return Snapshot(self._count, theta.to_host(), theta.buffers, starts)

    def copy_updaters(self, *, everybody: bool) -> Future[tuple[bytes, ...]]:
        """Those that are set aside."""
        answer: Future[tuple[bytes, ...]] = Future()
        copies, self._copies = self._copies, ()
        answer.set_result(copies if everybody else copies[:1])
        return answer

    @property
    def updater_copies(self) -> tuple[bytes, ...]:
        """Those that are set aside."""
        return self._copies

    def outcome(self) -> Outcome:
        """The result of a fit that is done."""
        partitions, told = self._partitions, self._told
        return Outcome(
            hashes=told.hashes | {"driver": self._theta.digest()},
            minibatches=partitions.minibatches,
            minibatches_expected=partitions.minibatches_expected,
            rows=[partition.rows for partition in partitions],
            executors={HOST},
            commits=self._count,
            staleness=Counter(),
            staleness_minibatches=0.0,
            staleness_minibatches_max=0.0,
            stats=dict(told.stats),
            traffic=Traffic(),
            wire=NO_BYTES,
            ignored=Counter(),
            hosts=dict.fromkeys(range(1, max(self._nodes) + 1), HOST),
            slow_links=(),
            departures=told.departures,
            notes=[],
            kept={},
            lost_mass=0.0,
            grants=0,
            phase_began_s=told.began_s,
            overflows=0,
            first_overflow=-1,
            stop_reason=self._stop_reason,
            minibatches_resumed=partitions.minibatches_resumed,
        )

    # -- the thread ------------------------------------------------------------------------------

    def run(self) -> None:
        """All rounds."""
        try:
            self._train()
            self._enter(Phase.DONE)
        except SparkstromError as error:
            self.failure = error
        except Exception as error:
            log.exception("the thread of the rounds ends")
            failure = TrainingError(f"the rounds failed: {error!r}")
            failure.__cause__ = error
            self.failure = failure
        finally:
            if self.failure is not None or self._cancelled.is_set():
                self._workers.drop(range(len(self._nodes)))
            self.finished.set()

    def _train(self) -> None:
        everybody = self._workers.begin()
        self._begin(everybody)
        if not any(partition.rows for partition in self._partitions):
            raise UsageError(NO_ROWS.format(len(everybody)))
        self._enter(Phase.RUNNING)
        self._end_epochs()  # which the fit before had trained and not measured
        while not (self._cancelled.is_set() or self._stop_reason) and self._round():
            self._tell_round()
        for phase in (Phase.DRAINING, Phase.AUDIT):
            self._enter(phase)
        reports = self._ask({partition: EndRounds() for partition in everybody})
        for partition, report in sorted(reports.items()):
            digest, told = json.loads(report)
            self._told.hashes[str(self._nodes[partition])] = digest
            self.reports.append(json.dumps(told))

    def _tell_round(self) -> None:
        """Where all have come to an epoch's end, it is judged before anything else happens."""
        self._progress = self._look()
        whole = min(partition.position.epoch for partition in self._partitions)
        if whole > self._epochs_whole:
            self._epochs_whole = whole
            self._looks.await_judgement()

    def _round(self) -> bool:
        """One round of the epoch that is behind; False: there is none left."""
        left = [p for p in self._partitions if not p.trained]
        if not left:
            return False
        epoch = min(p.position.epoch for p in left)
        there = [p for p in left if p.position.epoch == epoch]
        orders = {p.index: self._order(p.position, p.batches) for p in there}
        brought = {}
        for partition, report in sorted(self._ask(orders).items()):
            *brought[partition], counters, (lines, skipped) = json.loads(report)
            self._told.stats[self._nodes[partition]] = from_wire(counters)
            said = Says(host=HOST, partition=partition, lines=lines, skipped=skipped)
            self._told.heard.take(said, time.monotonic())
        with self._lock:
            self._combine(brought, [orders[p].count for p in sorted(brought)])
            for p in there:
                p.advance(Position(epoch, p.position.batch + orders[p.index].count))
            self._steps += max(order.count for order in orders.values())
        self._end_epochs()
        return True

    def _end_epochs(self) -> None:
        """Of those who have trained theirs. It is behind them once what was measured is here."""
        whole = [p for p in self._partitions if p.rows > 0 and p.position.batch == p.batches]
        orders = {p.index: EndEpoch(p.position.epoch) for p in whole}
        reports = self._ask(orders | self._measurements(whole))
        with self._lock:
            for partition, report in reports.items():
                self._told.stats[self._nodes[partition]] = from_wire(json.loads(report))
            self._progress = self._look()
            for p in whole:
                p.advance(Position(p.position.epoch + 1, 0))

    def _measurements(self, whole: Sequence[Partition]) -> dict[int, EndEpoch]:
        """Of those who only measure, once the last of those who train have trained an epoch."""
        trained = {p.index for p in whole}
        for epoch in {p.position.epoch for p in whole}:
            behind = [p for p in self._partitions if p.rows > 0 and p.position.epoch <= epoch]
            if trained.issuperset(p.index for p in behind):
                return dict.fromkeys(sorted(self._measure_only), EndEpoch(epoch))
        return {}

    def _order(self, position: Position, batches: int) -> TrainRound:
        epoch, first = position
        count = min(self._rounds.frequency, batches - first)
        return TrainRound(epoch, first, count, self._rounds.averages_state, self._steps)

    def _combine(self, brought: Mapping[int, list[float]], steps: Sequence[int]) -> None:
        """What all begin the next round with.

        brought  rows and their weight, by partition
        steps    that each of these has taken, in the order of their numbers
        """
        rounds, directory = self._rounds, self._rounds.directory
        partitions = sorted(brought)
        rows, weights = zip(*(brought[p] for p in partitions), strict=True)
        after = self._shared[[1 + partition for partition in partitions]]
        after.flags.writeable = False
        if not any(weights):
            weights = rows  # rows of no weight teach nothing: all are where they were
        if rounds.accumulator is None:
            made = averaged(list(after), weights)
            need_finite(rounds.model, made, self._count + 1)
        else:
            made = accumulated(rounds.accumulator, self._theta.to_host(), after, rows)
        self._shared[0] = made
        self._theta.load(made)
        self._count += 1
        if isinstance(rounds.model, Buffered) and self._theta.buffers:
            reports = [(directory / left(BUFFERS, p)).read_bytes() for p in partitions]
            self._theta.buffers = averaged_buffers(rounds.model, reports, weights)
            write_file(directory / BUFFERS, self._theta.buffers)
        self._keep_states(partitions, weights, steps)

    def _keep_states(
        self, partitions: list[int], weights: Sequence[float], steps: Sequence[int]
    ) -> None:
        """What the optimizers go on with: the mean, or each with its own."""
        directory = self._rounds.directory
        if not self._rounds.averages_state:
            for p in partitions:
                (directory / left(STATE, p)).replace(directory / own(STATE, p))
            return
        contents = [(directory / left(STATE, p)).read_bytes() for p in partitions]
        states = [decode_state_untrusted(content) for content in contents]
        write_file(directory / STATE, encode_state(averaged_states(states, weights, steps)))

    # -- asking ----------------------------------------------------------------------------------

    def _ask(self, orders: Mapping[int, WorkerOrder]) -> dict[int, str]:
        """Send each its order; return all reports.

        Raise what a worker raised, or TrainingError where a process dies again and again.
        """
        reports: dict[int, str] = {}
        for partition, order in orders.items():
            self._workers.send(partition, order)
        while missing := orders.keys() - reports.keys():
            for partition, answer in self._workers.answers(missing):
                if answer is None:
                    self._replace(partition)
                    self._workers.send(partition, orders[partition])
                elif answer.failure:
                    raise answer.as_error(partition)
                else:
                    reports[partition] = answer.report
            if self._cancelled.is_set():
                raise TrainingError("the rounds were given up: the fit has failed elsewhere")
        return reports

    def _replace(self, partition: int) -> None:
        """Another process, which reads the same rows. Raise TrainingError after too many."""
        how = self._workers.replace(partition)
        node, at_s = NodeId(self._nodes[partition]), time.monotonic()
        self._told.departures.append(Departure(node, partition, HOST, f"its process {how}", at_s))
        self._nodes[partition] = max(self._nodes) + 1
        self._begin([partition])

    def _begin(self, partitions: Iterable[int]) -> None:
        """Have their rows read."""
        begin, attempts = self._rounds.begin, self._workers.attempts
        for partition, report in self._ask({p: begin(p, attempts[p]) for p in partitions}).items():
            self._joined(partition, report)

    def _joined(self, partition: int, report: str) -> None:
        rows, checksum, batches, held_out = json.loads(report)
        known = self._partitions[partition]
        if not known.seen_before(rows, checksum, batches):
            raise TrainingError(f"partition {partition} has other rows than before")
        if not rows:
            known.advance(known.end)
            if held_out:
                self._measure_only.add(partition)

    def _states(self) -> tuple[bytes, ...]:
        """As checkpoints have them: the one for all, or each partition's own."""
        directory, states = self._rounds.directory, list[bytes]()
        everybody = range(len(self._nodes))
        names = [STATE] if self._rounds.averages_state else [own(STATE, p) for p in everybody]
        for partition, path in enumerate(directory / name for name in names):
            if path.exists():
                state = decode_state_untrusted(path.read_bytes())
                named = {UPDATER + name: value for name, value in state.items()}
                of = {} if self._rounds.averages_state else {PARTITION: partition}
                states.append(encode_state(named | of | {STEPS: self._steps}))
        return tuple(states)

    # -- telling ---------------------------------------------------------------------------------

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._told.began_s[phase] = time.monotonic()
        self._progress = self._look()

    def _look(self) -> Progress:
        partitions, told = self._partitions, self._told
        joined = sum(partition.rows >= 0 for partition in partitions)
        return Progress(
            phase=self._phase,
            workers=joined,
            partitions=len(partitions),
            joined=joined,
            minibatches=partitions.minibatches,
            minibatches_expected=partitions.minibatches_expected,
            commits=self._count,
            staleness=0.0,
            stats=dict(told.stats),
            training=frozenset(p.index for p in partitions if p.rows > 0),
            departures=tuple(told.departures),
            copied=joined,
            heard=told.heard.lines,
            unheard=told.heard.skipped,
        )
