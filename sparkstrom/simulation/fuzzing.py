"""Generate random runs from seeds, simulate many on all cores, and shrink those that fail.

A run is a simulated fit with a given number of workers, and limits and faults that are drawn from
its seed unless they are given. It fails if it violates an invariant (``simulation.invariants``) or
raises an exception; to shrink it is to find a smaller run that fails in the same way. A few runs
have no faults, because some defects show only without them. If ``Faults.controller_dies`` is given,
controllers die, and the fit resumes from the driver program's newest copy of the parameters.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from sparkstrom.codec.messages import Phase
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.fit_spec import PartitionStart
from sparkstrom.protocol.common.topology import DEPTH
from sparkstrom.simulation.component_factory import ComponentFactory
from sparkstrom.simulation.process import STEP_S_MIN
from sparkstrom.simulation.run_options import NO_FAULTS, Faults, ReplicaKind, RunSize, TransportMode
from sparkstrom.simulation.world import World

LINKS_MODE = "links"
# Shares of the runs:
CALM_SHARE = 0.05
BUFFERED_SHARE = 0.3
ENDPOINT_SHARE = 0.03  # few, because they take more than twice as long as the others
CODEC_SHARE = 0.07  # message endpoints also encode messages
REAL_SHARE = 0.01
INITIAL_REPLICA_SHARE = 0.7
RESUMED_SHARE = 0.1
COPIES_SHARE = 0.2
ISOLATED_SHARE = 0.1
ROUGH_SHARE = 0.5
SLACK_MIN, SLACK_MAX = 0.1, 3.0  # a link's rate, relative to what undisturbed training fills
RATE_MIN = 125_000.0  # bytes/s, 1 Mbit/s; slower links are not supported
TROUBLE_SHARE = 0.3  # of the runs over links; most test the links alone, without other faults
LINKS_END_S = 3_000.0
LINKS_START_S = 600.0  # each worker fetches its replica before training begins


def draw_scenario(seed: int, nodes: int, mode: str) -> tuple[RunSize, Faults]:
    """Return the size and the faults of a seed's run with ``nodes`` workers.

    ``mode`` is plain (all workers are children of the master), mesh (workers relay messages to
    others), links (messages of realistic length over links of limited rate) or links-mesh.
    """
    if mode.startswith(LINKS_MODE):
        return draw_link_scenario(seed, nodes, mesh=mode != LINKS_MODE)
    rng = random.Random(f"conditions of {seed}")
    publish_every = rng.choice((1, 1, 1, 3))
    size = RunSize(
        nodes=nodes,
        max_lead=rng.choice((None, publish_every, publish_every + 1, 6)),
        publish_every=publish_every,
        log_bytes=rng.choice((1, 1_000, 4_000, 1_000_000)),
        window_bytes=rng.choice((1, 100, 600, 10_000)),
        downlink_bytes=rng.choice((1, 300, 2_000)),
        empty_partitions=rng.choice((0, 0, 0, 0, 0, 0, 0, 0, 0, 1)) if nodes > 1 else 0,
        kept_files=rng.choice((0, 1, nodes)),
    )
    staleness = random.Random(f"staleness of {seed}").choice((None, None, 0, 1, 3))
    size = replace(size, max_staleness=staleness)
    if mode == "mesh":
        size = _with_mesh(size, random.Random(f"mesh of {seed}"))
    size = replace(size, has_buffers=random.Random(f"buffers of {seed}").random() < BUFFERED_SHARE)
    size = replace(size, through=_draw_transport_mode(seed))
    if random.Random(f"replicas of {seed}").random() < REAL_SHARE:
        size = replace(size, replicas=ReplicaKind.REAL)
    size = replace(size, whole=random.Random(f"starts of {seed}").random() < INITIAL_REPLICA_SHARE)
    size = _with_resumption(size, random.Random(f"checkpoints of {seed}"))
    if random.Random(f"copies of {seed}").random() < COPIES_SHARE:
        size = replace(size, copies_of_all=1)
    last = random.Random(f"last copies of {seed}")
    if last.random() < COPIES_SHARE:
        size = replace(size, last_copies=last.choice((1, 2)))
    luck = rng.random()
    if luck < CALM_SHARE:
        return size, NO_FAULTS
    stop, failure = rng.choice(((0.0, 0.0), (0.0, 0.0), (0.5, 0.0), (0.0, 0.2)))
    faults = Faults(stop=stop, failure=failure)
    if luck < CALM_SHARE + ROUGH_SHARE:
        faults = _with_rough_faults(faults, nodes, rng)
        faults = _with_clock_and_split_faults(faults, random.Random(f"strange of {seed}"))
        alone = random.Random(f"isolations of {seed}").random() < ISOLATED_SHARE
        deaths = random.Random(f"deaths of {seed}").choice((0, 0, 1, nodes))
        late = random.Random(f"late attempts of {seed}").choice((0, 0, 0, 1))
        faults = replace(faults, isolations=int(alone), driver_deaths=deaths, late_attempts=late)
    return size, faults


def _with_resumption(size: RunSize, rng: random.Random) -> RunSize:
    """Return the size, with a resumed fit or requests for optimizer states in some runs."""
    if rng.random() < COPIES_SHARE:
        size = replace(size, copies=rng.randint(1, 3))
    if rng.random() < RESUMED_SHARE:
        size = replace(size, resumed=rng.randint(1, 1 << 20))
    return size


def _draw_transport_mode(seed: int) -> TransportMode:
    """Return whether a seed's messages are objects, are encoded, or pass message endpoints."""
    luck = random.Random(f"bytes of {seed}").random()
    if luck < ENDPOINT_SHARE:
        return TransportMode.ENDPOINT
    return TransportMode.CODEC if luck < ENDPOINT_SHARE + CODEC_SHARE else TransportMode.OBJECTS


def _with_mesh(size: RunSize, rng: random.Random) -> RunSize:
    """Return the size with a mesh of low fan-out, so that few nodes form several levels.

    In some runs, sums of commits count as small, so that nodes send them.
    """
    fan_out = rng.choice((2, 2, 3, 8))
    depth = DEPTH
    while fan_out == 2 and 2 ** (depth + 1) - 2 < 2 * size.nodes:
        depth += 1
    return replace(
        size,
        fan_out=fan_out,
        depth=depth,
        merged_bytes=rng.choice((200, 1_000, 1 << 30)),
        per_executor=rng.choice((1, 2, 3)),
    )


def draw_link_scenario(seed: int, nodes: int, *, mesh: bool) -> tuple[RunSize, Faults]:
    """Return size and faults of a seed's run with realistic message lengths over links.

    The links carry 0.1 to 3 times the bytes that undisturbed training would send. ``mesh``:
    whether workers relay messages to other workers.
    """
    rng = random.Random(f"links of {seed}")
    publish_every = rng.choice((0, 0, 1, 4))  # 0: when the previous update is committed
    params = rng.choice((100_000, 100_000, 300_000, 1_000_000))
    fan_out = rng.choice((2, 3, 8))
    size = RunSize(
        nodes=nodes,
        epochs=3,
        batches=rng.choice((8, 16)),
        publish_every=publish_every,
        max_lead=rng.choice((None, max(1, publish_every), max(4, publish_every))),
        max_staleness=random.Random(f"staleness of {seed}").choice((None, 1, 1, 4)),
        log_bytes=rng.choice((8 << 20, 64 << 20)),
        window_bytes=8 << 20,
        downlink_bytes=4 << 20,
        per_executor=rng.choice((1, 1, 2)),
        kept_files=0,
        lease_s=10.0,
        patience_s=LINKS_START_S,
        end_s=LINKS_END_S,
        params=params,
        density=rng.choice((0.003, 0.01, 0.05, 0.13)),
    )
    if mesh:
        size = replace(size, fan_out=fan_out, depth=max(DEPTH, nodes.bit_length()))
    faults = replace(NO_FAULTS, step_s_max=rng.choice((0.1, 0.3, 0.6)))
    slack = math.exp(rng.uniform(math.log(SLACK_MIN), math.log(SLACK_MAX)))
    rate = max(RATE_MIN, slack * estimate_driver_bytes_per_s(size, faults.step_s_max))
    faults = replace(
        faults,
        rate=rate,
        narrow=rng.choice((0, 0, 1)),
        narrows=rng.choice((0, 0, 1)),
        slow_pollers=rng.choice((0, 0, 1)),
    )
    if rng.random() < TROUBLE_SHARE:
        faults = replace(
            faults,
            crashes=rng.choice((0, 1)),
            cuts=rng.choice((0, 1)),
            pauses=rng.choice((0, 1)),
            breaks=rng.choice((0, 1)),
            edge_deaths=rng.choice((0, 1)),
        )
    return size, faults


def estimate_driver_bytes_per_s(size: RunSize, step_s_max: float) -> float:
    """Return the bytes per second that the driver's host sends in undisturbed training."""
    # A worker's longest step is drawn from 0 to step_s_max, each of its steps from 0 to that.
    step_s = STEP_S_MIN + step_s_max / 4
    commits = size.nodes / (step_s * max(1, size.publish_every))
    children = min(size.fan_out, size.nodes) if size.mesh else size.nodes
    return commits * size.message_sizes.update_bytes * children


def _with_rough_faults(faults: Faults, nodes: int, rng: random.Random) -> Faults:
    """Return the faults with higher rates and numbers, in a random mixture."""
    many = 2 + nodes // 2
    return replace(
        faults,
        loss=rng.choice((0.0, 0.05, 0.25)),
        repeat=rng.choice((0.0, 0.1)),
        delay_ms_max=rng.choice((2.0, 40.0, 200.0)),
        late=rng.choice((0.0, 0.02, 0.2)),
        step_s_max=rng.choice((0.03, 0.2, 0.6)),
        crashes=rng.randint(0, many),
        executor_crashes=rng.randint(0, 1),
        doubles=rng.randint(0, 2),
        cuts=rng.randint(0, many),
        pauses=rng.randint(0, many),
        breaks=rng.randint(0, 2),
        exiles=rng.choice((0, 0, 0, 1)),
        master_lost=rng.choice((0, 0, 0, 0, 0, 0, 0, 1)),
        master_pauses=rng.randint(0, 2),
        edge_deaths=rng.randint(0, many),
        restart_s_max=rng.choice((1.0, 4.0, 8.0)),
        bandwidth=rng.choice((0.0, 0.0, 0.0, 200_000.0)),
    )


def _with_clock_and_split_faults(faults: Faults, rng: random.Random) -> Faults:
    """Return the faults with network partitions, differing clocks and slow machines added."""
    return replace(
        faults,
        splits=rng.choice((0, 0, 1)),
        slow=rng.choice((0, 0, 1)),
        drift=rng.choice((0.0, 0.0, 0.03)),
        leaps=rng.choice((0, 0, 3)),
    )


def with_overrides(size: RunSize, faults: Faults, given: dict[str, Any]) -> tuple[RunSize, Faults]:
    """Return size and faults with the values in ``given``, by field name."""
    of_size = {name: value for name, value in given.items() if hasattr(size, name)}
    of_faults = {name: value for name, value in given.items() if hasattr(faults, name)}
    return replace(size, **of_size), replace(faults, **of_faults)


COPY_S_MIN, COPY_S_MAX = 0.02, 1.0  # between two copies
EARLY_DEATH_S_MAX = 8.0  # some controllers die before training begins, without any copy
EARLY_SHARE = 0.2  # of the controllers that die
SEED_STRIDE = 1 << 32  # between the seeds of successive controllers


@dataclass(slots=True)
class MinibatchLedger:
    """Counts how often each minibatch of each partition is in the newest copy of the parameters.

    The driver program takes copies of the master's replica now and then. If the controller (the
    process that runs the master) dies, the fit continues from the newest copy.
    """

    counts: dict[int, Counter[int]] = field(default_factory=dict)  # partition -> minibatch -> count

    def with_commits_of(self, world: World, goals: dict[int, int]) -> MinibatchLedger:
        """Return a ledger that also counts the minibatches that this world has committed so far.

        Minibatches that produced no update count up to their partition's last one in ``goals``.
        """
        counts = {}
        for index, goal in goals.items():
            before = world.size.start_of(index).minibatches
            counts[index] = Counter(self.counts.get(index, Counter()))
            counts[index].update(world.checks.minibatches_since(index, before, goal))
        return MinibatchLedger(counts)

    def violations(self, goals: dict[int, int], what: str) -> list[str]:
        """Return violations of I2: each minibatch up to the goal must occur once, and no other.

        ``goals`` has the last minibatch of each partition; ``what`` names the copy in messages.
        """
        found = []
        for index, goal in goals.items():
            count = self.counts.get(index, Counter())
            wrong = {n: count[n] for n in {*range(1, goal + 1), *count} if count[n] != (n <= goal)}
            if wrong:
                found.append(
                    f"I2: partition {index}: {what} has wrong counts of minibatches: {wrong}"
                )
        return found


class ControllerLossWorld(World):
    """The world of one controller, which dies during the fit if ``dies`` is true.

    As in a real fit, the driver program copies the master's replica now and then: ``starts`` has
    each partition's position in the newest copy, ``ledger`` counts its minibatches. At the end of
    the fit the ledger must contain each minibatch once, over all controllers. Messages of an
    earlier controller would be rejected, so they are not simulated.
    """

    def __init__(
        self,
        seed: int,
        size: RunSize,
        faults: Faults,
        parts: ComponentFactory,
        ledger: MinibatchLedger,
        *,
        dies: bool,
    ) -> None:
        super().__init__(seed, size, faults, parts)
        self._before, self.ledger = ledger, ledger
        self.starts: tuple[PartitionStart, ...] = ()
        self.has_died = False
        if dies and self.time.rng.random() < EARLY_SHARE:
            self.time.at(self.time.rng.uniform(0, EARLY_DEATH_S_MAX), self._kill_controller)
        elif dies:
            self._has_late_death = True

    _has_late_death = False

    def step_master(self, event: ev.Event) -> None:
        """Pass an event to the master; when training begins, schedule copies and any death."""
        before = self.phase
        super().step_master(event)
        if before is not Phase.GATHERING or self.phase is before:
            return
        training_s = self.size.epochs * self.size.batches * self.faults.step_s_max
        if self._has_late_death:
            self.time.after(self.time.rng.uniform(0, 1.5 * training_s), self._kill_controller)
        self._schedule_copy()

    def _schedule_copy(self) -> None:
        """Schedule the driver program's next copy of the master's replica, after a random time."""
        self.time.after(self.time.rng.uniform(COPY_S_MIN, COPY_S_MAX), self._take_copy)

    def _take_copy(self) -> None:
        """Take a copy as of the latest commit, and check that its content matches its positions."""
        if self.phase is not Phase.RUNNING or self.master.aborted:
            return
        self._schedule_copy()
        self.starts = self.master.partitions.as_starts()
        goals = {index: start.minibatches for index, start in enumerate(self.starts)}
        self.ledger = self._before.with_commits_of(self, goals)
        self.checks.check_driver_copy(self.replica)
        if not self.checks.violations:
            what = f"a copy at commit {self.master.sequencer.head}"
            self.checks.violations += self.ledger.violations(goals, what)

    def _kill_controller(self) -> None:
        """End this world: the controller and its workers are gone."""
        if self.phase is Phase.DONE or self.master.aborted or self.is_master_lost:
            return
        self.time.say("the controller dies")
        self.time.faults["controllers"] += 1
        self.has_died = self.time.over = True

    def run(self) -> list[str]:
        """Run the world; return all violations, including those in the final parameters."""
        return [*super().run(), *self._check_delivered()]

    def _check_delivered(self) -> list[str]:
        """Return violations of I2: minibatches that the final parameters do not have exactly once.

        Return [] if the fit has not completed.
        """
        if self.phase is not Phase.DONE:
            return []
        whole = self.master.phases.stop_reason is None
        goals = {
            each.index: each.epochs * max(0, each.batches) if whole else each.minibatches
            for each in self.master.partitions
        }
        return self._before.with_commits_of(self, goals).violations(goals, "what is delivered")


def simulate_controller_losses(
    seed: int, size: RunSize, faults: Faults, parts: Callable[[int, RunSize], ComponentFactory]
) -> Iterator[ControllerLossWorld]:
    """Yield one world per controller, to be run by the caller, until one completes the fit.

    ``parts`` returns the components of a world from its seed and size.
    """
    begins = {index: size.start_of(index).minibatches for index in range(size.nodes)}
    ledger = MinibatchLedger({index: Counter(range(1, upto + 1)) for index, upto in begins.items()})
    for life in range(faults.controller_dies + 1):
        dies, rng = life < faults.controller_dies, seed + life * SEED_STRIDE
        world = ControllerLossWorld(rng, size, faults, parts(rng, size), ledger, dies=dies)
        yield world
        if not world.has_died:
            return
        ledger = world.ledger
        size = replace(size, starts=world.starts or size.starts, kept_files=0)


SEEDS_PER_TASK = 8
GC_THRESHOLD = 50_000  # new objects between two garbage collections; Python's default is 700


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of one seed's run."""

    seed: int  # from which the run was drawn
    violations: list[str]  # empty if the run succeeded
    updates: int  # number of committed updates
    faults: dict[str, int]  # kind of fault -> how often it happened
    transcript: list[str]  # lines

    def extended_by(self, world: World, violations: list[str]) -> RunResult:
        """Return this result combined with that of the next controller of the same fit.

        ``world`` is the simulation with that controller; ``violations`` were found in it.
        """
        return RunResult(
            self.seed,
            self.violations + violations,
            self.updates + len(world.checks.commits),
            dict(Counter(self.faults) + world.time.faults),
            self.transcript + world.time.transcript,
        )


def simulate_seed(seed: int, nodes: int, mode: str, given: dict[str, Any]) -> RunResult:
    """Simulate the run of a seed with ``nodes`` workers, and return its result.

    Values in ``given`` override the size and faults that ``draw_scenario`` draws for this seed and
    ``mode``, by field name. An exception in the run counts as a violation.
    """
    size, faults = with_overrides(*draw_scenario(seed, nodes, mode), given)
    result = RunResult(seed, [], 0, {}, [])
    worlds: Iterator[World] = iter([World(seed, size, faults, _make_components(seed, size))])
    if faults.controller_dies:
        worlds = simulate_controller_losses(seed, size, faults, _make_components)
    for world in worlds:
        try:
            with _rare_garbage_collection():
                violations = world.run()
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__}: {error}"
            text = f"{what} ({where.name}, {where.filename}:{where.lineno})"
            violations = [*world.checks.violations, text]
        result = result.extended_by(world, violations)
    return result


@contextmanager
def _rare_garbage_collection() -> Iterator[None]:
    """Collect garbage rarely in a ``with`` block, as runs create few reference cycles."""
    before = gc.get_threshold()
    gc.set_threshold(GC_THRESHOLD, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _make_components(seed: int, size: RunSize) -> ComponentFactory:
    """Return the factory for a run's components; import the real ones only if needed."""
    if size.replicas is ReplicaKind.NUMBERS:
        return ComponentFactory(size)
    from sparkstrom.simulation.real_components import RealComponentFactory

    return RealComponentFactory(size, seed)


def simulate_seeds(
    seeds: range, nodes: int, mode: str, given: dict[str, Any], processes: int
) -> Iterator[RunResult]:
    """Simulate each seed by ``simulate_seed``, in several processes; yield results in order."""
    one = partial(simulate_seed, nodes=nodes, mode=mode, given=given)
    if processes == 1 or len(seeds) < SEEDS_PER_TASK:
        yield from map(one, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap(one, seeds, chunksize=SEEDS_PER_TASK)


SHRINK_S = 20.0  # real time spent on the search for a smaller run
WIDE_LIMITS = {
    "log_bytes": 1_000_000,
    "window_bytes": 10_000,
    "downlink_bytes": 10_000,
    "max_lead": 1000,
}
SHRINKABLE_SIZES = ("nodes", "epochs", "batches", "kept_files", "empty_partitions")


@dataclass(frozen=True, slots=True)
class ShrunkRun:
    """The smallest failing run that was found: size, faults and result."""

    size: RunSize  # its size and options
    faults: Faults  # its faults
    result: RunResult  # what it returned

    def given(self, seed: int, mode: str) -> dict[str, Any]:
        """Return the fields to set, by name, to repeat this run with its number of nodes.

        Fields that are not in the result are as drawn from ``seed``, or for faults as in NO_FAULTS.
        """
        size, _ = draw_scenario(seed, self.size.nodes, mode)
        return {
            field.name: getattr(mine, field.name)
            for mine, base in ((self.size, size), (self.faults, NO_FAULTS))
            for field in fields(mine)
            if getattr(mine, field.name) != getattr(base, field.name)
        }


def violation_kind(violations: list[str]) -> str:
    """Return the name of the violated invariant or raised exception; empty without violations.

    Two runs fail in the same way if their kinds are equal.
    """
    return violations[0].split(":")[0] if violations else ""


def shrink_failure(result: RunResult, nodes: int, mode: str, given: dict[str, Any]) -> ShrunkRun:
    """Return the smallest run found in SHRINK_S seconds that fails in the same way.

    Faults are switched off, counts lowered and limits widened, one by one; a change is kept if the
    run still fails in the same way.

    Args:
        result: the failed run.
        nodes: number of nodes with which the run was drawn.
        mode: mode with which it was drawn; see ``draw_scenario``.
        given: values that replaced drawn ones, by field name.
    """
    until_s = time.monotonic() + SHRINK_S
    small = ShrunkRun(*with_overrides(*draw_scenario(result.seed, nodes, mode), given), result)
    changing = True
    while changing:
        changing = False
        for size, faults in _smaller_runs(small.size, small.faults):
            if time.monotonic() > until_s:
                return small
            again = _simulate_exactly(result.seed, mode, size, faults)
            if violation_kind(again.violations) == violation_kind(result.violations):
                small, changing = ShrunkRun(size, faults, again), True
                break
    return small


def _simulate_exactly(seed: int, mode: str, size: RunSize, faults: Faults) -> RunResult:
    """Run a seed with exactly this size and these faults; return the result.

    These replace everything that ``draw_scenario`` draws for ``mode``.
    """
    given = {f.name: getattr(part, f.name) for part in (size, faults) for f in fields(part)}
    return simulate_seed(seed, size.nodes, mode, given)


def _smaller_runs(size: RunSize, faults: Faults) -> Iterator[tuple[RunSize, Faults]]:
    """Yield the size and faults of runs with one simplification each, the largest first."""
    for each in fields(faults):
        usual, now = getattr(NO_FAULTS, each.name), getattr(faults, each.name)
        if now != usual:
            yield size, replace(faults, **{each.name: usual})
    for name in SHRINKABLE_SIZES:
        now = getattr(size, name)
        least = 0 if name in ("kept_files", "empty_partitions") else 1
        for value in sorted({least, now // 2, now - 1}):
            if least <= value < now:
                yield with_overrides(size, faults, {name: value})
    for each in fields(faults):
        usual, now = getattr(NO_FAULTS, each.name), getattr(faults, each.name)
        if isinstance(now, int) and now > max(1, usual):
            for value in (now // 2, now - 1):
                yield size, replace(faults, **{each.name: value})
    for name, wide in WIDE_LIMITS.items():
        if getattr(size, name) != wide:
            yield with_overrides(size, faults, {name: wide})
