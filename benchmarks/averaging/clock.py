"""A model of the time and bytes of rounds and of shared updates, on links of one rate.

Every host has one worker and one link; the driver program has a host of its own. For each averaged
vector of 4 x params bytes, a round of averaging sends

    up      from each worker, all but its own part, to the workers that add
            the parts: (k - 1) / k vectors
    in      to the driver program, the means: 1 vector
    down    from the driver program, a broadcast, blocks of which executors
            also send to one another: 1 vector to each worker, 2 from the
            driver program

one after the other, each at the link's rate, and no worker trains in this time. Shared updates go
up to the driver program and down to all other workers while training continues. If the driver
program's link needs longer for them than the steps take, training takes that long.
"""

from __future__ import annotations

from dataclasses import dataclass

F32 = 4


@dataclass(frozen=True, slots=True)
class Link:
    """The link of each host, and the size and step time of the training."""

    bits: float  # per second
    params: float
    step_s: float
    job_s: float  # overhead of a Spark job

    @property
    def vector_s(self) -> float:
        """Seconds in which a link transfers one vector."""
        return 8 * F32 * self.params / self.bits


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds and bytes of an epoch or a part of it."""

    seconds: float
    bytes: float


def rounds_cost(link: Link, workers: int, steps: int, each: int, vectors: int, own: int) -> Cost:
    """Return the cost of ``steps`` steps of each worker in rounds of ``each`` steps.

    ``vectors`` vectors are averaged. Another ``own`` vectors of each worker are not averaged: they
    all go to the driver program, and with the broadcast to all workers.
    """
    rounds = -(-steps // each)
    up = vectors * (workers - 1) / workers
    through = vectors + own * workers
    seconds = (up + through + 2 * through) * link.vector_s + link.job_s
    vector = F32 * link.params
    moved = (workers * up + through + workers * through) * vector
    return Cost(steps * link.step_s + rounds * seconds, rounds * moved)


def sharing_cost(link: Link, workers: int, steps: int, bytes_sent: float) -> Cost:
    """Return the cost of ``steps`` steps of each worker that send ``bytes_sent`` in all as updates.

    Each update goes up once, and down to all other workers; the driver program's link has the most
    traffic.
    """
    down = bytes_sent * (workers - 1)
    seconds = max(steps * link.step_s, 8 * max(down, bytes_sent) / link.bits)
    return Cost(seconds, bytes_sent + down)
