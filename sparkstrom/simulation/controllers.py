"""Controllers: a fit whose controller dies, and which goes on with another one from a copy.

Each controller has a world of its own: what is left of the one before has another key, and is not
heard. The driver program takes copies as ``spark.driver.controller_copies`` does: the master's
replica, and how far each partition is in it. A ledger has what is in the newest one; so at the end
it has what is delivered, over all controllers, and each minibatch must be in it once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from sparkstrom.codec.messages import Phase
from sparkstrom.protocol.common import events as ev
from sparkstrom.protocol.common.fit_spec import PartitionStart
from sparkstrom.simulation.faults import Faults
from sparkstrom.simulation.run_sizes import Size
from sparkstrom.simulation.sim_parts import Parts
from sparkstrom.simulation.world import World

COPY_S_MIN, COPY_S_MAX = 0.02, 1.0  # between two copies
GATHERS_S = 8.0  # some die before training begins, and then there is no copy
EARLY_SHARE = 0.2
LIVES = 1 << 32  # seeds of further controllers lie so far from those of first ones


@dataclass(slots=True)
class Ledger:
    """What of each partition is in the newest copy: minibatches, by how often."""

    counts: dict[int, Counter[int]] = field(default_factory=dict)

    def with_(self, world: World, goals: dict[int, int]) -> Ledger:
        """And what this world's commits have, up to now."""
        counts = {}
        for index, goal in goals.items():
            before = world.size.start_of(index).minibatches
            counts[index] = Counter(self.counts.get(index, Counter()))
            counts[index].update(world.checks.trained_since(index, before, goal))
        return Ledger(counts)

    def violations(self, goals: dict[int, int], what: str) -> list[str]:
        """Each minibatch up to the goal is there once, and no other one."""
        found = []
        for index, goal in goals.items():
            count = self.counts.get(index, Counter())
            wrong = {n: count[n] for n in {*range(1, goal + 1), *count} if count[n] != (n <= goal)}
            if wrong:
                found.append(f"I2: partition {index}: {what} has minibatches so often: {wrong}")
        return found


class MortalWorld(World):
    """Its controller dies, if ``dies``; ``starts`` and ``ledger``: of the newest copy."""

    def __init__(
        self, seed: int, size: Size, faults: Faults, parts: Parts, ledger: Ledger, *, dies: bool
    ) -> None:
        super().__init__(seed, size, faults, parts)
        self._before, self.ledger = ledger, ledger
        self.starts: tuple[PartitionStart, ...] = ()
        self.died = False
        if dies and self.time.chance.random() < EARLY_SHARE:
            self.time.at(self.time.chance.uniform(0, GATHERS_S), self._die)
        elif dies:
            self._dies_later = True

    _dies_later = False

    def step_master(self, event: ev.Event) -> None:
        before = self.phase
        super().step_master(event)
        if before is not Phase.GATHERING or self.phase is before:
            return
        training_s = self.size.epochs * self.size.batches * self.faults.step_s_max
        if self._dies_later:
            self.time.after(self.time.chance.uniform(0, 1.5 * training_s), self._die)
        self._copy_later()

    def _copy_later(self) -> None:
        self.time.after(self.time.chance.uniform(COPY_S_MIN, COPY_S_MAX), self._copy)

    def _copy(self) -> None:
        """As of one commit; what it claims must be in it, and nothing else."""
        if self.phase is not Phase.RUNNING or self.master.aborted:
            return
        self._copy_later()
        self.starts = self.master.partitions.as_starts()
        goals = {index: start.minibatches for index, start in enumerate(self.starts)}
        self.ledger = self._before.with_(self, goals)
        self.checks.copy_holds(self.replica)
        if not self.checks.violations:
            what = f"a copy at commit {self.master.sequencer.head}"
            self.checks.violations += self.ledger.violations(goals, what)

    def _die(self) -> None:
        """Nothing of it is heard any more; its workers are ended."""
        if self.phase is Phase.DONE or self.master.aborted or self.master_is_lost:
            return
        self.time.say("the controller dies")
        self.time.faults["controllers"] += 1
        self.died = self.time.over = True

    def run(self) -> list[str]:
        return [*super().run(), *self._wrong()]

    def _wrong(self) -> list[str]:
        """With what a fit that is done delivers, over all its controllers."""
        if self.phase is not Phase.DONE:
            return []
        whole = self.master.phases.stop_reason is None
        goals = {
            each.index: each.epochs * max(0, each.batches) if whole else each.minibatches
            for each in self.master.partitions
        }
        return self._before.with_(self, goals).violations(goals, "what is delivered")


def play_controllers(
    seed: int, size: Size, faults: Faults, parts: Callable[[int, Size], Parts]
) -> Iterator[MortalWorld]:
    """One after the other, until one comes to the end of the fit; each when it has been played."""
    begins = {index: size.start_of(index).minibatches for index in range(size.nodes)}
    ledger = Ledger({index: Counter(range(1, upto + 1)) for index, upto in begins.items()})
    for life in range(faults.controller_dies + 1):
        dies, chance = life < faults.controller_dies, seed + life * LIVES
        world = MortalWorld(chance, size, faults, parts(chance, size), ledger, dies=dies)
        yield world
        if not world.died:
            return
        ledger = world.ledger
        size = replace(size, starts=world.starts or size.starts, kept_files=0)
