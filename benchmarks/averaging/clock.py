"""Clock: what rounds and shared updates take on links of one rate; reckoned, in seconds.

Every host has one worker and one link, the driver program is one more host. A round of averaging
moves, of each vector of 4 x params bytes that is averaged,

    up      a worker sends all but its own share to those who add up        (k - 1) / k vectors
    in      the driver program takes the means                              1 vector
    down    the driver program sends a broadcast, blocks of which executors
            take from one another, as they come                             1 vector to each, 2 from
                                                                            the driver program

one after the other, each at the link's rate, and no worker trains meanwhile. Updates that are
shared go up to the driver program and down to all others; training continues meanwhile, and takes
as long as the driver program's link takes for what it sends, if that is longer.
"""

from __future__ import annotations

from dataclasses import dataclass

F32 = 4


@dataclass(frozen=True, slots=True)
class Link:
    """Of all hosts, and what is trained over it."""

    bits: float  # per second
    params: float
    step_s: float
    job_s: float  # of a Spark job, besides its work

    @property
    def vector_s(self) -> float:
        """One vector over one link."""
        return 8 * F32 * self.params / self.bits


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one epoch, or of a part of it."""

    seconds: float
    bytes: float


def rounds_cost(link: Link, workers: int, steps: int, each: int, vectors: int, own: int) -> Cost:
    """So many steps of each worker in rounds of ``each``.

    ``vectors`` are averaged; ``own`` are each worker's, and go through the driver program: all of
    them in, and with each broadcast to all.
    """
    rounds = -(-steps // each)
    up = vectors * (workers - 1) / workers
    through = vectors + own * workers
    seconds = (up + through + 2 * through) * link.vector_s + link.job_s
    vector = F32 * link.params
    moved = (workers * up + through + workers * through) * vector
    return Cost(steps * link.step_s + rounds * seconds, rounds * moved)


def sharing_cost(link: Link, workers: int, steps: int, bytes_sent: float) -> Cost:
    """So many steps of each worker, in which all together have sent so many bytes of updates.

    Each update goes up once and down to all others; the driver program's link carries most of it.
    """
    down = bytes_sent * (workers - 1)
    seconds = max(steps * link.step_s, 8 * max(down, bytes_sent) / link.bits)
    return Cost(seconds, bytes_sent + down)
