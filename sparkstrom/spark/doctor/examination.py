"""Examine a cluster for `sparkstrom doctor`: start Spark, run small jobs and collect findings.

A finding is the result of one check. Spark is started with the configuration that spark-submit
would use, but without dynamic allocation and speculation.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sparkstrom.base.errors import SetupError, SparkstromError, UsageError
from sparkstrom.base.identity import Endpoint
from sparkstrom.fit.fit_context import TaskSlots
from sparkstrom.fit.strategy import GradientSharing
from sparkstrom.fit.supervisor import find_cause
from sparkstrom.options.gradient_sharing import SharedTrainingMaster
from sparkstrom.options.network import AUTO, EXECUTOR, parse_controller
from sparkstrom.options.network import DRIVER as DRIVER_CONTROLLER
from sparkstrom.options.resolution import resolve
from sparkstrom.planning.memory import count_driver_edges, count_executor_edges
from sparkstrom.spark.controller.reachability import UdpEchoServer
from sparkstrom.spark.doctor import host_facts
from sparkstrom.spark.doctor.checks import (
    DRIVER,
    Finding,
    HostExpectations,
    Level,
    Report,
    UdpNeeds,
    build_matrix,
    check_configuration,
    check_executors,
    check_host,
    check_java,
    check_spark,
    check_udp,
    check_versions,
    create_failure,
    explain_job_failure,
    find_udp_needs,
)
from sparkstrom.spark.doctor.host_facts import (
    HostFacts,
    InspectionOptions,
    InspectionTask,
    ProbeResult,
    ProbeTask,
    WorkerVersions,
    identify_process,
    inspect_executor,
    inspect_host,
    probe_from_executor,
)
from sparkstrom.spark.executor_slots import (
    count_requested_executors,
    count_workers,
    driver_host,
    get_slots,
)
from sparkstrom.spark.jobs import SparkJob
from sparkstrom.transport.aeron.channel_settings import choose_mtu
from sparkstrom.transport.udp_probe import TOKEN_BYTES, ProbeGroup, UdpProbe
from sparkstrom.worker.network_setup import (
    DISCARD_PORT,
    check_driver_machine,
    choose_driver_address,
)

POLL_S = 0.1  # interval of counting the registered executors
REGISTRATION_QUIET_S = 2.0  # if their number is unknown, wait this long after the latest executor

CONF_OVERRIDES = {  # for barrier jobs; the user's own values are checked separately
    "spark.dynamicAllocation.enabled": "false",
    "spark.speculation": "false",
}
QUIET_LOGGING = {"spark.ui.showConsoleProgress": "false", "spark.log.level": "ERROR"}

Result = TypeVar("Result")


def check_installation() -> Finding | None:
    """Return a failure if Java or pyspark is missing on this machine, else None.

    If pyspark is not installed as a package, make the cluster's own (SPARK_HOME) importable.
    """
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else shutil.which("java")
    if java is None or not os.access(java, os.X_OK):
        place = f"{java} (JAVA_HOME)" if home else "no java in PATH"
        remedy = "install Java 17 or later (apt-get install openjdk-17-jre-headless), set JAVA_HOME"
        return create_failure("java", "driver", f"not found: {place}", remedy)
    if importlib.util.find_spec("pyspark") is None:
        import findspark

        try:
            findspark.init()  # the cluster's own
        except (ValueError, OSError, IndexError) as error:
            remedy = "pip install 'sparkstrom[spark]', or set SPARK_HOME to the cluster's Spark"
            return create_failure("spark", "driver", f"there is no pyspark ({error})", remedy)
    return None


class DoctorSession:
    """The Spark application of `sparkstrom doctor`, configured like the user's job."""

    def __init__(self, master: str | None, conf: Mapping[str, str]) -> None:
        """Start Spark on ``master``, with the properties ``conf``; None is the configured master.

        Raise SetupError with Spark's message if that fails.
        """
        from pyspark import SparkConf, SparkContext

        given = SparkConf(loadDefaults=False).setAppName("sparkstrom doctor")
        given.setAll([*conf.items(), *([("spark.master", master)] if master else [])])
        try:
            SparkContext._ensure_initialized(conf=given)
            settings = SparkConf()  # includes spark-defaults.conf
            settings.setAll(given.getAll())
            settings.setIfMissing("spark.master", "local[*]")
            self.conf = dict(settings.getAll())
            settings.setAll([*CONF_OVERRIDES.items(), *QUIET_LOGGING.items()])
            self.context: Any = SparkContext(conf=settings)
        except Exception as error:  # py4j's, pyspark's, Java's
            raise SetupError(f"Spark does not start: {find_cause(str(error))}") from error

    def __enter__(self) -> DoctorSession:
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(Exception):  # py4j's, if it has already stopped
            self.context.stop()

    def java_version(self) -> str:
        """Return the version of the driver's JVM."""
        return str(self.context._jvm.java.lang.System.getProperty("java.version"))

    def count_executors(self) -> int:
        """Return the number of registered executors. In local mode this is 1, the driver."""
        is_local = str(self.context.master).startswith("local[") or self.context.master == "local"
        return int(self.context._jsc.sc().getExecutorMemoryStatus().size()) - (not is_local)

    def await_executors(self, seconds: float) -> tuple[int, TaskSlots | None]:
        """Wait up to ``seconds`` for the requested executors.

        Return how many were requested, and the task slots of those that have registered (None if
        none has). If it is unknown how many were requested, wait until no more of them register.
        """
        end_s = time.monotonic() + seconds
        changed_s, last_count = time.monotonic(), 0
        wanted, master = 1, self.context.master
        is_known = master.startswith("local") or count_requested_executors(self.conf, master) > 0
        while time.monotonic() < end_s:
            count = self.count_executors()
            if count != last_count:
                changed_s, last_count = time.monotonic(), count
            try:
                wanted = get_slots(self.context).executors
            except SetupError:  # none has registered, and no setting says how many to expect
                wanted = max(wanted, count)
            if count >= wanted and (
                is_known or time.monotonic() - changed_s > REGISTRATION_QUIET_S
            ):
                break
            time.sleep(POLL_S)
        if last_count == 0:
            return wanted, None
        return wanted, TaskSlots(last_count, get_slots(self.context).per_executor)

    def run_barrier_job(self, slots: int, task: Callable[..., Any], seconds: float) -> list[Any]:
        """Run ``task`` in ``slots`` simultaneous Spark tasks; return everything that they yield.

        Raise SetupError if the job fails (with Spark's message) or takes longer than ``seconds``.
        """

        def run_stage() -> list[Any]:
            """Run the barrier stage and return its results."""
            rdd = self.context.parallelize(range(slots), slots).barrier()
            return list(rdd.mapPartitions(task).collect())

        group = f"sparkstrom-doctor-{time.monotonic_ns()}"
        job = SparkJob(self.context, group, run_stage, description="sparkstrom doctor")
        job.start()
        if not job.wait(seconds):
            job.cancel()
            job.wait(POLL_S)
            raise SetupError(f"a job of {slots} short tasks was not done after {seconds:.0f} s")
        if job.error is not None:
            raise SetupError(find_cause(str(job.error)))
        return job.reports


def run_in_background(work: Callable[[], Result]) -> tuple[threading.Thread, list[Result]]:
    """Run ``work`` in a new thread; return the thread and a list that will contain the result."""
    results: list[Result] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    return thread, results


CONTROLLER_CHECKS = ("aeron library", "media driver", "shared memory")  # what a controller needs
JOB_TIMEOUT_S = 120.0  # limit of a small job; Python workers must start, and may compile kernels
PROBE_S, PROBE_PER_PEER_S = 10.0, 1.0  # limit of the UDP probe: fixed part, and part per process


@dataclass(frozen=True, slots=True)
class ExaminationOptions:
    """The options that the user gave to `sparkstrom doctor`."""

    master: str | None  # Spark's master URL; None: the configured master
    conf: Mapping[str, str]  # Spark's properties, as given to spark-submit
    wait_s: float  # how long to wait for executors


def examine(options: ExaminationOptions, notify: Callable[[str], None]) -> Report:
    """Run all checks and return the report.

    ``notify`` shows the user what is being done. Raise UsageError for invalid options.
    """
    # Check the options before anything is started.
    resolve(SharedTrainingMaster(), options.conf, os.environ)
    report = Report()
    finding = check_installation()
    if finding is not None:
        report.add([finding])
        return report
    notify(f"starting Spark ({options.master or 'the default master'})")
    try:
        session = DoctorSession(options.master, options.conf)
    except SetupError as error:
        remedy = "see Spark's messages above; try the same master with spark-submit"
        report.add([create_failure("spark", DRIVER, str(error), remedy)])
        return report
    try:
        with session:
            _Examination(session, options, report, notify).run()
    except SparkstromError:
        raise
    except Exception as error:  # py4j's: no master answered, or the application was ended
        problem = f"Spark stopped while it was examined: {find_cause(str(error))}"
        remedy = (
            f"check that {options.master or 'the default master'} is right and reachable from this"
            " machine; try the same master with spark-submit"
        )
        report.add([create_failure("spark", DRIVER, problem, remedy)])
    return report


class _Examination:
    """Runs all checks once in a DoctorSession."""

    def __init__(
        self,
        session: DoctorSession,
        options: ExaminationOptions,
        report: Report,
        notify: Callable[[str], None],
    ) -> None:
        """Prepare the checks: they add findings to ``report``; ``notify`` shows what is done."""
        self._session, self._options, self._report, self._notify = session, options, report, notify
        self._master = resolve(SharedTrainingMaster(), session.conf, os.environ)
        self._slots, self._workers = TaskSlots(0, 0), 0  # of a fit; set by _await_executors

    def run(self) -> None:
        """Run the checks in order; stop if a failure makes later checks impossible."""
        self._report.add([check_java(DRIVER, self._session.java_version())])
        self._report.add([check_spark(self._session.context.version)])
        if not self._await_executors() or not self._compare_versions():
            return
        self._notify("inspecting every executor")
        facts = self._inspect_hosts()
        if facts:
            self._report_hosts(facts)
            self._probe_udp(facts)

    def _await_executors(self) -> bool:
        """Wait for executors and check the configuration; return whether checks can continue."""
        self._notify(f"waiting for executors, at most {self._options.wait_s:.0f} s")
        wanted, slots = self._session.await_executors(self._options.wait_s)
        count = slots.executors if slots is not None else 0
        self._report.add([check_executors(wanted, count, self._options.wait_s)])
        if slots is None:
            return False
        try:
            strategy = GradientSharing(self._master)
            self._slots, self._workers = slots, count_workers(slots, strategy)
            self._master.void.topology(self._workers)
        except UsageError as error:
            problem, _, remedy = str(error).rpartition(": ")
            self._report.add([create_failure("configuration", DRIVER, problem or remedy, remedy)])
            return False
        self._report.add(check_configuration(self._session.conf))
        return True

    def _run_barrier_job(
        self, task: Callable[..., object], seconds: float = JOB_TIMEOUT_S
    ) -> list[Any] | None:
        """Run a barrier job and return its results; if it fails, add a finding and return None."""
        try:
            return self._session.run_barrier_job(self._slots.total, task, seconds)
        except SetupError as error:
            driver_facts = WorkerVersions(*next(host_facts.collect_versions()))
            self._report.add([explain_job_failure(str(error), driver_facts.python)])
            return None

    def _compare_versions(self) -> bool:
        """Compare versions of Python and sparkstrom on executors with the driver's.

        Return whether checks can continue.
        """
        from pyspark import cloudpickle as untyped

        cloudpickle: Any = untyped
        cloudpickle.register_pickle_by_value(host_facts)
        try:
            answers = self._run_barrier_job(host_facts.collect_versions)
        finally:
            cloudpickle.unregister_pickle_by_value(host_facts)
        if answers is None:
            return False
        driver_facts = WorkerVersions(*next(host_facts.collect_versions()))
        return self._report.add(
            check_versions(driver_facts, [WorkerVersions(*each) for each in answers])
        )

    def _inspect_hosts(self) -> list[HostFacts]:
        """Return facts about the driver's host, then the executors'; [] if their job fails."""
        void = self._master.void
        address = partial(choose_driver_address, void, driver_host(self._session.context))
        edges = count_driver_edges(void.topology(self._workers), self._workers)
        scratch = Path(tempfile.gettempdir())
        driver_facts = inspect_host(
            InspectionOptions(address, void.controller_ports(), edges, 0, scratch)
        )
        try:
            controller = Endpoint(address(), DISCARD_PORT)
        except SparkstromError:  # reported by the check of the media driver
            controller = Endpoint("127.0.0.1", DISCARD_PORT)
        executor_facts = self._run_barrier_job(
            partial(inspect_executor, InspectionTask(void, self._workers, controller))
        )
        return (
            [driver_facts, *sorted(executor_facts, key=identify_process)]
            if executor_facts is not None
            else []
        )

    def _report_hosts(self, all_facts: Sequence[HostFacts]) -> None:
        """Check the facts about all processes and their hosts; add the findings to the report."""
        edges = sum(count_executor_edges(self._master.void.topology(self._workers)))
        drivers_by_host = Counter(facts_of_process.host for facts_of_process in all_facts)
        for name, facts_of_process in zip(name_processes(all_facts), all_facts, strict=True):
            if facts_of_process.java and name != DRIVER:
                self._report.add([check_java(name, facts_of_process.java)])
            expected = HostExpectations(edges, drivers_by_host[facts_of_process.host])
            findings = check_host(name, facts_of_process, expected)
            if name == DRIVER and self._is_driver_excused:
                findings = [excuse_driver(finding) for finding in findings]
            self._report.add(findings)

    @property
    def _controller(self) -> str:
        """Where a fit's controller runs; in local mode, "auto" means the driver program."""
        controller = self._master.void.controller
        is_local = str(self._session.context.master).startswith("local")
        return DRIVER_CONTROLLER if controller == AUTO and is_local else controller

    @property
    def _may_controller_leave(self) -> bool:
        """Whether the controller may run on an executor, so that the driver needs no UDP."""
        if self._controller != AUTO:
            return parse_controller(self._controller).is_in_task
        void = replace(self._master.void, controller=EXECUTOR, controller_address=None)
        try:
            count_workers(self._slots, GradientSharing(replace(self._master, void=void)))
        except UsageError:  # no task slot is left for it
            return False
        return True

    @property
    def _is_driver_excused(self) -> bool:
        """Whether a fit runs its controller on an executor because this machine lacks something.

        With ``controller="auto"``, a fit notices only what ``resolve_controller`` tests, which does
        not start a media driver.
        """
        if not self._may_controller_leave or self._controller != AUTO:
            return self._may_controller_leave
        void, host = self._master.void, driver_host(self._session.context)
        try:
            check_driver_machine(void, self._slots.total, host)
            UdpEchoServer(choose_driver_address(void, host), void.controller_ports()).close()
        except SetupError:
            return True
        return False

    def _find_udp_needs(self) -> UdpNeeds:
        """Return between which processes a fit sends datagrams, according to the matrix."""
        is_mesh = self._master.void.topology(self._workers).depth_max > 1
        needs = find_udp_needs(self._report.matrix, self._controller, is_mesh=is_mesh)
        return needs if needs.driver or self._may_controller_leave else UdpNeeds()

    def _probe_udp(self, facts: Sequence[HostFacts]) -> None:
        """Probe UDP between all processes whose media driver started; report the findings.

        Do nothing if fewer than two did, or if the driver program's did not and has to.
        """
        names = name_processes(facts)
        reachable = [n for n, each in enumerate(facts) if each.media_driver.endpoint is not None]
        endpoints = assign_distinct_ports(
            [e for n in reachable if (e := facts[n].media_driver.endpoint) is not None]
        )
        has_driver = 0 in reachable
        if len(reachable) < 2 or not (has_driver or self._is_driver_excused):
            return
        seconds = PROBE_S + PROBE_PER_PEER_S * len(reachable)
        self._notify(f"probing UDP between {len(reachable)} processes, {seconds:.0f} s at most")
        group = ProbeGroup(endpoints, secrets.token_bytes(TOKEN_BYTES), seconds)
        places = {identify_process(facts[n]): place for place, n in enumerate(reachable) if n > 0}
        results = self._run_probes(ProbeTask(group, places), has_driver=has_driver)
        if results is None:
            return
        place_names = [names[n] for n in reachable]
        heard = {place: received for place, received, error in results if not error}
        self._report.matrix = build_matrix(place_names, heard)
        for place, _, error in results:
            if error:
                problem, _, remedy = error.partition("; ")
                self._report.add([create_failure("udp", place_names[place], problem, remedy)])
        ports = {name: e.port for name, e in zip(place_names, endpoints, strict=True)}
        self._report.add(check_udp(self._report.matrix, ports, self._find_udp_needs()))

    def _run_probes(self, task: ProbeTask, *, has_driver: bool) -> list[ProbeResult] | None:
        """Probe UDP from the executors and, at the same time, from the driver; return all results.

        Without ``has_driver``, the driver program does not take part. Return None if the executors'
        job fails. If the driver program can bind no port, it does not take part if a fit does not
        need it; otherwise return only a result with this error.
        """
        if not has_driver:
            return self._run_barrier_job(partial(probe_from_executor, task), JOB_TIMEOUT_S)
        is_over = False
        try:
            with UdpProbe(
                replace(task.group, seconds=JOB_TIMEOUT_S),
                0,
                partial(choose_mtu, own=task.group.endpoints[0]),
            ) as probe:
                thread, heard = run_in_background(lambda: probe.run(stopped=lambda: is_over))
                results = self._run_barrier_job(partial(probe_from_executor, task), JOB_TIMEOUT_S)
                is_over = True
                thread.join()
        except SetupError as error:
            if self._is_driver_excused:
                return self._run_probes(task, has_driver=False)
            return [(0, {}, str(error))]
        return None if results is None else [(0, heard[0], ""), *results]


def excuse_driver(finding: Finding) -> Finding:
    """Return a finding about the driver program; what only a controller needs is a warning."""
    if finding.level is not Level.FAILURE or finding.check not in CONTROLLER_CHECKS:
        return finding
    found = f"{finding.found} (not needed: the controller runs on an executor, in a task slot)"
    return replace(finding, level=Level.WARNING, found=found)


def name_processes(facts: Sequence[HostFacts]) -> list[str]:
    """Return names of processes: "driver" for the first, and each executor's host for the others.

    The names of several executors on one host are numbered.
    """
    names = [DRIVER]
    executors = Counter(each.host for each in facts[1:])
    seen: Counter[str] = Counter()
    for each in facts[1:]:
        seen[each.host] += 1
        number = f" ({seen[each.host]})" if executors[each.host] > 1 else ""
        names.append(f"{each.host}{number}")
    return names


def assign_distinct_ports(endpoints: Sequence[Endpoint]) -> tuple[Endpoint, ...]:
    """Return the endpoints with duplicates moved to the next free port, as media drivers do.

    Processes at one address may have found the same port free by trying it at different times.
    """
    assigned: list[Endpoint] = []
    for endpoint in endpoints:
        distinct = endpoint
        while distinct in assigned:
            distinct = distinct._replace(port=distinct.port + 1)
        assigned.append(distinct)
    return tuple(assigned)
