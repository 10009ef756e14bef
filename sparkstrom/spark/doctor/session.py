"""A doctor's Spark session, started as spark-submit would start the job's, and its small jobs."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from sparkstrom.base.errors import SetupError
from sparkstrom.spark.data.job_errors import cause_of
from sparkstrom.spark.doctor.findings import Finding, failure
from sparkstrom.spark.driver.cluster import Slots, slots_of

LOOK_S = 0.1
SETTLE_S = 2.0  # executors of a master URL that does not say how many register one by one

OVERRIDES = {  # barrier jobs cannot be had with these; what the job has is looked at before
    "spark.dynamicAllocation.enabled": "false",
    "spark.speculation": "false",
}
QUIET = {"spark.ui.showConsoleProgress": "false", "spark.log.level": "ERROR"}

Result = TypeVar("Result")


def missing() -> Finding | None:
    """What this machine lacks to start Spark at all."""
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else shutil.which("java")
    if java is None or not os.access(java, os.X_OK):
        place = f"{java} (JAVA_HOME)" if home else "there is no java in PATH"
        remedy = "install Java 17 or later (apt-get install openjdk-17-jre-headless), set JAVA_HOME"
        return failure("java", "driver", f"not found: {place}", remedy)
    if importlib.util.find_spec("pyspark") is None:
        import findspark

        try:
            findspark.init()  # the cluster's own
        except (ValueError, OSError, IndexError) as error:
            remedy = "pip install 'sparkstrom[spark]', or set SPARK_HOME to the cluster's Spark"
            return failure("spark", "driver", f"there is no pyspark ({error})", remedy)
    return None


class DoctorSession:
    """A context: one Spark application. ``conf``: as the job would have it."""

    def __init__(self, master: str | None, conf: Mapping[str, str]) -> None:
        """Start it. Raise SetupError, in Spark's words, where it does not come up."""
        from pyspark import SparkConf, SparkContext

        given = SparkConf(loadDefaults=False).setAppName("sparkstrom doctor")
        given.setAll([*conf.items(), *([("spark.master", master)] if master else [])])
        try:
            SparkContext._ensure_initialized(conf=given)
            settings = SparkConf()  # spark-defaults.conf, too
            settings.setAll(given.getAll())
            settings.setIfMissing("spark.master", "local[*]")
            self.conf = dict(settings.getAll())
            settings.setAll([*OVERRIDES.items(), *QUIET.items()])
            self.context: Any = SparkContext(conf=settings)
        except Exception as error:  # py4j's, pyspark's, Java's
            raise SetupError(f"Spark does not start: {cause_of(str(error))}") from error

    def __enter__(self) -> DoctorSession:
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(Exception):  # py4j's: it has stopped already
            self.context.stop()

    def java_version(self) -> str:
        """Of the driver's JVM."""
        return str(self.context._jvm.java.lang.System.getProperty("java.version"))

    def registered(self) -> int:
        """Executors that are there; the one that is the driver itself, in local mode."""
        alone = str(self.context.master).startswith("local[") or self.context.master == "local"
        return int(self.context._jsc.sc().getExecutorMemoryStatus().size()) - (not alone)

    def await_executors(self, seconds: float) -> tuple[int, Slots | None]:
        """Wait for as many as were asked for; how many are wanted, and what has come."""
        end_s = time.monotonic() + seconds
        settled_s, before = time.monotonic(), 0
        wanted = 1
        while time.monotonic() < end_s:
            count = self.registered()
            if count != before:
                settled_s, before = time.monotonic(), count
            try:
                wanted = slots_of(self.context).executors
            except SetupError:  # nobody has registered, and nobody said how many there will be
                wanted = max(wanted, count)
            known = self.context.master.startswith("local") or self._asked()
            if count >= wanted and (known or time.monotonic() - settled_s > SETTLE_S):
                break
            time.sleep(LOOK_S)
        if before == 0:
            return wanted, None
        return wanted, Slots(before, slots_of(self.context).per_executor)

    def _asked(self) -> bool:
        return "spark.executor.instances" in self.conf

    def barrier_job(self, slots: int, task: Callable[..., Any], seconds: float) -> list[Any]:
        """What ``task`` yields in as many tasks at the same time.

        Raise SetupError, in Spark's words, where the job fails or takes longer.
        """
        group = f"sparkstrom-doctor-{time.monotonic_ns()}"
        done: list[Any] = []
        failed: list[Exception] = []

        def submit() -> None:
            try:
                self.context.setJobGroup(group, "sparkstrom doctor", interruptOnCancel=True)
                rdd = self.context.parallelize(range(slots), slots).barrier()
                done.extend(rdd.mapPartitions(task).collect())
            except Exception as error:  # handed to the main thread
                failed.append(error)

        from pyspark import InheritableThread

        thread = InheritableThread(target=submit, daemon=True)
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            self.context.cancelJobGroup(group)
            thread.join(LOOK_S)
            raise SetupError(f"a job of {slots} short tasks was not done after {seconds:.0f} s")
        if failed:
            raise SetupError(cause_of(str(failed[0])))
        return done


def in_background(work: Callable[[], Result]) -> tuple[threading.Thread, list[Result]]:
    """Work in a thread of its own, and where its result will be."""
    results: list[Result] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    return thread, results
