"""Roll calling: waiting for the job by which a client of Spark Connect counts executors.

A client sees no executors, so a job with a task for each core says who is there. Where nobody is,
it waits as all jobs do, for ever; here it does so for as long as a fit may wait for its start.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from sparkstrom.base.errors import SetupError
from sparkstrom.spark.driver.fitting import FitJob, end_job
from sparkstrom.spark.driver.registering import LOOK_S, SAY_FIRST_S, SAY_S

WAITS = "sparkstrom waits: for executors of {}, which a job counts"
NOBODY = (
    "no executor of {} has run a task within {:g} s (start_timeout): see the cluster's web page:"
    " are executors there, does the cluster have the cores and the memory that they want, or do"
    " other clients of this server, or another application, hold their slots? Where the server's"
    " spark.executor.instances and spark.executor.cores say how many there are, nobody is counted"
)


def roll_called(job: FitJob, server: str, seconds: float, say: Callable[[str], None]) -> list[Any]:
    """What the job's tasks say. Raise SetupError where they have not after ``seconds``."""
    began_s = time.monotonic()
    say_s = began_s + SAY_FIRST_S
    job.start()
    try:
        while not job.wait(LOOK_S):
            now_s = time.monotonic()
            if now_s - began_s > seconds:
                raise SetupError(NOBODY.format(server, seconds))
            if now_s > say_s:
                say_s = now_s + SAY_S
                say(WAITS.format(server))
    except BaseException:
        end_job(job)
        raise
    if job.error is not None:
        raise job.error
    return job.reports
