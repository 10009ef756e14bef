"""The conditions of a rehearsed (simulated) fit: links, step times, slow and dying workers."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from sparkstrom.options.common import require, require_seconds, require_whole

RESTART_S = 5.0  # until Spark has restarted a lost task and its process has imported modules
STEP_SHARE_MIN = 0.1  # a step takes at least this share of its mean time
WORKERS_MAX = 4096  # more do not fit into one process
KILLS_MAX = 100_000  # more would exhaust memory; such a number is a typing error


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The processor time that a worker's operations take, in seconds.

    Raises UsageError for impossible numbers.
    """

    step_s: float  # mean time of a training step, without sharing
    jitter: float = 0.0  # standard deviation of a step's time, relative to its mean
    encode_s: float = 0.0  # time to encode an update
    apply_s: float = 0.0  # time to add another worker's update to the parameters

    def __post_init__(self) -> None:
        require_seconds("step", self.step_s)
        require(0 <= self.jitter < 1, "jitter", self.jitter, "must be from 0 to below 1")
        for name, value in (("encode", self.encode_s), ("apply", self.apply_s)):
            require(0 <= value < math.inf, name, value, "must be 0 or more seconds")

    def draw_step_s(self, rng: random.Random) -> float:
        """Return the time of one step, which varies if there is a jitter."""
        share = max(STEP_SHARE_MIN, rng.gauss(1.0, self.jitter)) if self.jitter else 1.0
        return self.step_s * share


@dataclass(frozen=True, slots=True)
class Conditions:
    """The cluster on which a fit is rehearsed.

    Raises UsageError for impossible numbers.
    """

    link_bits_s: float  # rate of each host's link in each direction, in bits per second
    latency_s: float  # from one host to another, in one direction
    times: StepTimes  # of every worker that is not slow
    stragglers: int = 0  # number of slow workers: those with the highest partition numbers
    straggler_speed: float = 1.0  # speed of a slow worker, relative to the others
    kills: int = 0  # number of workers that die, evenly spread over the fit; Spark restarts each
    restart_s: float = RESTART_S  # seconds from a death until the next attempt starts
    seed: int = 0  # of the random step times and of the choice of workers that die

    def __post_init__(self) -> None:
        reason = "must be finite and above 0 bits per second"
        require(0 < self.link_bits_s < math.inf, "link", self.link_bits_s, reason)
        require(
            0 <= self.latency_s < math.inf, "latency", self.latency_s, "must be 0 or more seconds"
        )
        require_whole("stragglers", self.stragglers, 0)
        speed, reason = self.straggler_speed, "must be above 0 and at most 1, such as 0.5"
        require(0 < speed <= 1, "straggler", speed, reason)
        require_whole("kill", self.kills, 0)
        reason = f"must be at most {KILLS_MAX:,} deaths of workers"
        require(self.kills <= KILLS_MAX, "kill", self.kills, reason)
        require_seconds("restart", self.restart_s)
        require_whole("seed", self.seed, 0)

    def speed(self, partition: int, workers: int) -> float:
        """Return the speed of a partition's worker relative to workers that are not slow.

        ``workers``: number of all workers, of which the last ``stragglers`` are slow.
        """
        return self.straggler_speed if partition >= workers - self.stragglers else 1.0

    def for_workers(self, workers: int) -> Conditions:
        """Return the conditions for a fit with ``workers`` workers.

        At least one worker is not slow, and a single worker is never killed.
        """
        slow = min(self.stragglers, workers - 1)
        return replace(self, stragglers=slow, kills=self.kills if workers > 1 else 0)

    def list_kill_moments(self, minibatches: int) -> list[int]:
        """Return, in ascending order, after how many trained minibatches a worker dies.

        ``minibatches`` is the number that all workers train.
        """
        return [minibatches * (i + 1) // (self.kills + 1) for i in range(self.kills)]
