"""Dynamic allocation: executors that Spark asks for when tasks wait, and gives back when idle.

A fit has a fixed number of tasks, one per worker, all in one stage. Spark asks for executors until
each has a slot; those that come late join in mid-training, and none with a worker is idle. So all
that a fit must know is how many executors to count on. A fit in rounds has that many tasks in each
of its jobs, which are ordinary ones: fewer executors take longer, and are idle between two jobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkstrom.spark.driver.averaging_master import TrainingMaster
from sparkstrom.spark.driver.training_master import SharedTrainingMaster

ENABLED = "spark.dynamicAllocation.enabled"
INITIAL = "spark.dynamicAllocation.initialExecutors"
INSTANCES = "spark.executor.instances"
LEAST, MOST = "spark.dynamicAllocation.minExecutors", "spark.dynamicAllocation.maxExecutors"
ATTEMPTS = "spark.stage.maxConsecutiveAttempts"
USUAL = 2  # executors: Spark's own number on YARN where nobody says one
FEW_ATTEMPTS = 10

UNSAID = (
    "spark.dynamicAllocation.enabled=true, and nothing says how many executors a fit should have:"
    " it counts on those that are there, and on 2 where there are fewer; for N of them set --conf"
    " spark.dynamicAllocation.initialExecutors=N"
)
FEW = (
    "spark.stage.maxConsecutiveAttempts={attempts}: the {ordinal} executor that is taken away"
    " {when} ends the fit, because the rows it had shuffled must be made again, and with dynamic"
    " allocation executors are taken away: set --conf spark.stage.maxConsecutiveAttempts=100"
)


IN_A_FIT, IN_A_ROUND = "while a fit trains", "while one round is made"
ONE_JOB = (
    "who comes late joins in mid-training, who is taken away is replaced, and no executor with a"
    " worker is idle"
)
ROUNDS = (
    "with fewer a round takes longer, who comes late has tasks of the next job, and what is lost"
    " with an executor that is taken away, as idle ones between two jobs may be, Spark makes again"
)


def is_dynamic(conf: Any) -> bool:
    """``conf``: anything with ``get(key, default)``."""
    return bool(conf.get(ENABLED, "false").lower() == "true")


def wish_of(conf: Any) -> int | None:
    """How many executors the application begins with, as far as somebody said it.

    The least and the most are limits for many kinds of jobs, not a number for this one.
    """
    said = max(int(conf.get(key, "0")) for key in (INITIAL, INSTANCES))
    return said or None


def executors_wanted(conf: Any, registered: int) -> int:
    """How many a fit counts on; at least one, and no more than there may be."""
    wanted = wish_of(conf) or max(registered, USUAL)
    wanted = max(wanted, int(conf.get(LEAST, "0")))
    most = int(conf.get(MOST, "0")) or wanted
    return min(wanted, most)


def check_allocation(conf: Mapping[str, str], when: str = IN_A_FIT) -> list[str]:
    """Warnings of what is not said, or ends a fit early; none without dynamic allocation.

    ``when``: in which time Spark counts the executors that are taken away.
    """
    if not is_dynamic(conf):
        return []
    out = []
    if wish_of(conf) is None:
        out.append(UNSAID)
    served = conf.get("spark.shuffle.service.enabled", "false").lower() == "true"
    attempts = int(conf.get(ATTEMPTS, "4"))
    if attempts < FEW_ATTEMPTS and not served:
        ordinal = {1: "first", 2: "second", 3: "third"}.get(attempts, f"{attempts}th")
        out.append(FEW.format(attempts=attempts, ordinal=ordinal, when=when))
    return out


def allocation_note(workers: int, slots: int, master: TrainingMaster) -> str:
    """What a fit does about it, for people; ``slots``: of one executor."""
    executors = -(-workers // slots)
    shares = isinstance(master, SharedTrainingMaster)
    return (
        f"{ENABLED}=true: this fit has {workers} workers, for which Spark needs {executors}"
        f" executors or more and asks for those that are missing; {ONE_JOB if shares else ROUNDS}"
    )
