"""Spark checks: configuration, versions and what executors say of themselves. Pure functions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from sparkstrom.base.errors import UsageError
from sparkstrom.spark.doctor.alone import Versions
from sparkstrom.spark.doctor.findings import Finding, failure, good, warning
from sparkstrom.spark.driver.cluster import KEY_IN_THE_CLEAR, check_scheduling, is_key_sealed

SPARK_FIRST, SPARK_LAST = (3, 5), (4,)
JAVA_MIN = 17
PYTHON_DIFFERS = "PYTHON_VERSION_MISMATCH"
NO_MODULE = "ModuleNotFoundError"


def java_finding(where: str, version: str) -> Finding:
    """Of a JVM that runs."""
    number = re.match(r"(?:1\.)?(\d+)", version)
    if number is None:
        return warning("java", where, "its version cannot be read", "see that it is 17 or later")
    if int(number[1]) < JAVA_MIN:
        remedy = f"install Java {JAVA_MIN} or later and point JAVA_HOME to it (executors: --conf "
        remedy += "spark.executorEnv.JAVA_HOME=...); Spark 4 does not start without"
        return warning("java", where, version, remedy)
    return good("java", where, version)


def spark_finding(version: str) -> Finding:
    """Of the session."""
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if numbers >= SPARK_FIRST and numbers[:1] <= SPARK_LAST:
        return good("spark", "driver", version)
    remedy = "use Spark 3.5 to 4.x: sparkstrom is not tried with others"
    at_fault = failure if numbers < SPARK_FIRST else warning
    return at_fault("spark", "driver", version, remedy)


def conf_findings(conf: Mapping[str, str], workers: int) -> list[Finding]:
    """What `fit` would say of Spark's configuration, and of the key's way to the executors."""
    try:
        warnings = check_scheduling(conf)
    except UsageError as error:
        what, _, remedy = str(error).rpartition(": ")
        return [failure("configuration", "driver", what, remedy)]
    found = []
    for text in warnings:
        what, _, remedy = text.rpartition("; ") if "; " in text else text.rpartition(": ")
        found.append(warning("configuration", "driver", what, remedy))
    if is_key_sealed(conf):
        found.append(good("encryption", "driver", "the key of a fit travels sealed"))
    else:
        what, _, remedy = KEY_IN_THE_CLEAR.partition("; ")
        found.append(warning("encryption", "driver", what, remedy))
    return found or [good("configuration", "driver", "nothing that stands in the way")]


def executors_finding(wanted: int, registered: int, seconds: float) -> Finding:
    """Have all come that the application has asked for?"""
    check, found = "executors", f"{registered} of {wanted} registered within {seconds:.0f} s"
    if registered >= wanted > 0:
        return good(check, "driver", f"{registered} registered")
    remedy = (
        "see in the resource manager's page whether it has room and the application is running, "
        "and in its logs whether executors die; ask for fewer or smaller ones"
    )
    return (warning if registered else failure)(check, "driver", found, remedy)


def version_findings(here: Versions, there: Sequence[Versions]) -> list[Finding]:
    """Python and sparkstrom, on the driver and in every Python worker."""
    found = [
        good("python", "driver", f"{here.python} ({here.program})"),
        good("sparkstrom", "driver", here.sparkstrom),
    ]
    for one, workers in sorted(Counter(there).items()):
        host = one.host + (f" ({workers} workers)" if workers > 1 else "")
        python = f"{one.python} ({one.program})"
        if one.python.split(".")[:2] != here.python.split(".")[:2]:
            remedy = f"have Python {here.python} there: --conf spark.pyspark.python=..., or conda"
            found.append(failure("python", host, python, remedy))
        elif one.python != here.python:
            remedy = "use one build everywhere; pickles of one may not load in another"
            found.append(warning("python", host, f"{python}, the driver {here.python}", remedy))
        else:
            found.append(good("python", host, python))
        found.append(_sparkstrom(host, one, here.sparkstrom))
    return found


def _sparkstrom(host: str, one: Versions, here: str) -> Finding:
    remedy = f"install sparkstrom=={here} there, or send the environment (--archives, --py-files)"
    if one.refused:
        return failure("sparkstrom", host, one.refused, remedy)
    if one.sparkstrom != here:
        return failure("sparkstrom", host, f"{one.sparkstrom}, the driver has {here}", remedy)
    return good("sparkstrom", host, one.sparkstrom)


def job_failure(cause: str, python: str) -> Finding:
    """What it means that a small job has failed; ``cause`` in Spark's words."""
    if PYTHON_DIFFERS in cause:
        remedy = f"have Python {python} on executors: --conf spark.pyspark.python=..., or conda"
        return failure("python", "executors", cause, remedy)
    if NO_MODULE in cause:
        remedy = "install it on executors, or send it: --py-files, --archives"
        return failure("python", "executors", cause, remedy)
    return failure("executors", "executors", cause, "see the executors' logs: stderr in Spark's UI")
