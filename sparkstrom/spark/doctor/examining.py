"""Examining: a doctor's run from beginning to end; what it needs of Spark it is given."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sparkstrom.base.errors import SetupError, SparkstromError, UsageError
from sparkstrom.base.identity import Endpoint
from sparkstrom.spark.data.job_errors import cause_of
from sparkstrom.spark.doctor import alone
from sparkstrom.spark.doctor.alone import Versions
from sparkstrom.spark.doctor.findings import Report, failure
from sparkstrom.spark.doctor.host_checks import Expected, host_findings
from sparkstrom.spark.doctor.host_facts import HostFacts, Looking, look
from sparkstrom.spark.doctor.on_executors import (
    LookOrder,
    Probed,
    ProbeOrder,
    length_in,
    look_there,
    name_of,
    probe_there,
)
from sparkstrom.spark.doctor.session import DoctorSession, in_background, missing
from sparkstrom.spark.doctor.spark_checks import (
    conf_findings,
    executors_finding,
    java_finding,
    job_failure,
    spark_finding,
    version_findings,
)
from sparkstrom.spark.doctor.udp_checks import matrix_of, udp_findings
from sparkstrom.spark.driver.cluster import driver_host, workers_for
from sparkstrom.spark.driver.memory_parts import driver_edges, edges_of
from sparkstrom.spark.driver.settings import resolve
from sparkstrom.spark.driver.training_master import SharedTrainingMaster
from sparkstrom.spark.executor.interfaces import driver_address
from sparkstrom.transport.udp_probe import TOKEN_BYTES, ProbeGroup, UdpProbe

DRIVER = "driver"
JOB_S = 120.0  # for one of the small jobs: Python workers start, kernels may be compiled
PROBE_S, PROBE_PER_PEER_S = 10.0, 1.0
DISCARD = 9  # a port for a route's sake: nothing is sent


@dataclass(frozen=True, slots=True)
class Call:
    """What the user asked for."""

    master: str | None
    conf: Mapping[str, str]
    wait_s: float  # for executors


def examine(call: Call, say: Callable[[str], None]) -> Report:
    """Look at everything. Raise UsageError for options that no job could have."""
    resolve(SharedTrainingMaster(), call.conf, os.environ)  # before anything is started
    report = Report()
    lacking = missing()
    if lacking is not None:
        report.add([lacking])
        return report
    say(f"starting Spark ({call.master or 'the default master'})")
    try:
        session = DoctorSession(call.master, call.conf)
    except SetupError as error:
        remedy = "see Spark's own lines above; try the same master with spark-submit"
        report.add([failure("spark", DRIVER, str(error), remedy)])
        return report
    try:
        with session:
            _Examination(session, call, report, say).run()
    except SparkstromError:
        raise
    except Exception as error:  # py4j's: no master answered, or the application was ended
        what = f"Spark stopped while it was examined: {cause_of(str(error))}"
        remedy = (
            f"is {call.master or 'the default master'} right, and can this machine reach it? Try"
            " the same master with spark-submit"
        )
        report.add([failure("spark", DRIVER, what, remedy)])
    return report


class _Examination:
    """Of one session."""

    def __init__(
        self, session: DoctorSession, call: Call, report: Report, say: Callable[[str], None]
    ) -> None:
        self._session, self._call, self._report, self._say = session, call, report, say
        self._master = resolve(SharedTrainingMaster(), session.conf, os.environ)
        self._slots = self._workers = 0

    def run(self) -> None:
        """Stop where what comes next could not be looked at."""
        self._report.add([java_finding(DRIVER, self._session.java_version())])
        self._report.add([spark_finding(self._session.context.version)])
        if not self._await_executors() or not self._compare_versions():
            return
        self._say("looking at every executor")
        facts = self._look()
        if facts:
            self._tell(facts)
            self._probe(facts)

    def _await_executors(self) -> bool:
        self._say(f"waiting for executors, at most {self._call.wait_s:.0f} s")
        wanted, slots = self._session.await_executors(self._call.wait_s)
        came = slots.executors if slots is not None else 0
        self._report.add([executors_finding(wanted, came, self._call.wait_s)])
        if slots is None:
            return False
        try:
            self._slots, self._workers = slots.total, workers_for(slots, self._master)
            self._master.void.topology(self._workers)
        except UsageError as error:
            what, _, remedy = str(error).rpartition(": ")
            self._report.add([failure("configuration", DRIVER, what or remedy, remedy)])
            return False
        self._report.add(conf_findings(self._session.conf, self._workers))
        return True

    def _job(self, task: Callable[..., object], seconds: float = JOB_S) -> list[Any] | None:
        """None where it failed, which is a finding."""
        try:
            return self._session.barrier_job(self._slots, task, seconds)
        except SetupError as error:
            here = Versions(*next(alone.versions()))
            self._report.add([job_failure(str(error), here.python)])
            return None

    def _compare_versions(self) -> bool:
        from pyspark import cloudpickle as untyped

        cloudpickle: Any = untyped
        cloudpickle.register_pickle_by_value(alone)
        try:
            answers = self._job(alone.versions)
        finally:
            cloudpickle.unregister_pickle_by_value(alone)
        if answers is None:
            return False
        here = Versions(*next(alone.versions()))
        return self._report.add(version_findings(here, [Versions(*each) for each in answers]))

    # -- machines --------------------------------------------------------------------------------

    def _look(self) -> list[HostFacts]:
        """The driver's, then the executors'; none where they cannot be had."""
        void = self._master.void
        address = partial(driver_address, void, driver_host(self._session.context))
        edges = driver_edges(void.topology(self._workers), self._workers)
        scratch = Path(tempfile.gettempdir())
        here = look(Looking(address, void.controller_ports(), edges, 0, scratch))
        try:
            controller = Endpoint(address(), DISCARD)
        except SparkstromError:  # told as the media driver's finding
            controller = Endpoint("127.0.0.1", DISCARD)
        there = self._job(partial(look_there, LookOrder(void, self._workers, controller)))
        return [here, *sorted(there, key=name_of)] if there is not None else []

    def _tell(self, facts: Sequence[HostFacts]) -> None:
        edges = sum(edges_of(self._master.void.topology(self._workers)))
        drivers = Counter(each.host for each in facts)
        for name, each in zip(names_of(facts), facts, strict=True):
            if each.java and name != DRIVER:
                self._report.add([java_finding(name, each.java)])
            self._report.add(host_findings(name, each, Expected(edges, drivers[each.host])))

    # -- the network -----------------------------------------------------------------------------

    def _probe(self, facts: Sequence[HostFacts]) -> None:
        """UDP between all that have an address."""
        names = names_of(facts)
        able = [n for n, each in enumerate(facts) if each.drive.endpoint is not None]
        endpoints = own_ports([e for n in able if (e := facts[n].drive.endpoint) is not None])
        if len(able) < 2 or able[0] != 0:
            return
        seconds = PROBE_S + PROBE_PER_PEER_S * len(able)
        self._say(f"probing UDP between {len(able)} processes, {seconds:.0f} s at most")
        group = ProbeGroup(endpoints, secrets.token_bytes(TOKEN_BYTES), seconds)
        places = {name_of(facts[n]): place for place, n in enumerate(able) if n > 0}
        told = self._measure(ProbeOrder(group, places))
        if told is None:
            return
        of_place = [names[n] for n in able]
        heard = {place: seen for place, seen, refused in told if not refused}
        self._report.matrix = matrix_of(of_place, heard)
        for place, _, refused in told:
            if refused:
                what, _, remedy = refused.partition("; ")
                self._report.add([failure("udp", of_place[place], what, remedy)])
        ports = {name: e.port for name, e in zip(of_place, endpoints, strict=True)}
        self._report.add(udp_findings(self._report.matrix, ports))

    def _measure(self, order: ProbeOrder) -> list[Probed] | None:
        """The driver probes as long as the executors' job runs."""
        over = False
        try:
            with UdpProbe(replace(order.group, seconds=JOB_S), 0, length_in(order.group, 0)) as own:
                thread, heard = in_background(lambda: own.run(stopped=lambda: over))
                told = self._job(partial(probe_there, order), JOB_S)
                over = True
                thread.join()
        except SetupError as error:
            return [(0, {}, str(error))]
        return None if told is None else [(0, heard[0], ""), *told]


def names_of(facts: Sequence[HostFacts]) -> list[str]:
    """Short ones: the driver first, then hosts, numbered where one has several executors."""
    names = [DRIVER]
    executors = Counter(each.host for each in facts[1:])
    seen: Counter[str] = Counter()
    for each in facts[1:]:
        seen[each.host] += 1
        number = f" ({seen[each.host]})" if executors[each.host] > 1 else ""
        names.append(f"{each.host}{number}")
    return names


def own_ports(endpoints: Sequence[Endpoint]) -> tuple[Endpoint, ...]:
    """One for each: those of one address found the same port free, and take the next ones.

    As media drivers do, which bind one after another.
    """
    made: list[Endpoint] = []
    for endpoint in endpoints:
        own = endpoint
        while own in made:
            own = own._replace(port=own.port + 1)
        made.append(own)
    return tuple(made)
