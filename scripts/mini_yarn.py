"""A real YARN on the loopback interface: a ResourceManager and NodeManagers, each in its own JVM.

NodeManagers use 127.0.0.1 and 127.0.0.2 in turn, so that YARN and Spark take two of them for two
hosts. All files are in one home directory. ``start`` lists its daemons there, and ``stop`` ends
them and the containers of the nodes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import quote
from xml.sax.saxutils import escape

from scripts.yarn_jars import PYSPARK, classpath
from sparkstrom.transport.aeron.driver_directories import (
    ProcessIdentity,
    identify_process,
    is_process_alive,
)

ROOT = Path(__file__).parents[1]
STATE = "daemons.json"  # the list of daemons, in the home directory
SPARK_DEFAULTS = "spark-conf/spark-defaults.conf"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 5.0

JVM = (
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Xmx256m",
    "-XX:+UnlockDiagnosticVMOptions",
    "-XX:-BytecodeVerificationRemote",  # verifying Hadoop's classes takes a seventh of the start
    "--add-opens=java.base/java.lang=ALL-UNNAMED",
    "-Djava.net.preferIPv4Stack=true",
    "-Djavax.xml.bind.JAXBContextFactory"
    "=org.apache.hadoop.shaded.com.sun.xml.bind.v2.ContextFactory",
)
SERVER = "org.apache.hadoop.yarn.server"
LOG4J = """
rootLogger.level = info
rootLogger.appenderRef.c.ref = C
appender.c.type = Console
appender.c.name = C
appender.c.target = SYSTEM_ERR
appender.c.layout.type = PatternLayout
appender.c.layout.pattern = %d{ISO8601} %p %c{1}: %m%n
"""


@dataclass(frozen=True)
class Submitted:
    """The outcome of one application."""

    exit_code: int
    output: str  # spark-submit's own, both streams
    container_logs: str  # stdout and stderr of all containers of the application


@dataclass(frozen=True)
class Cluster:
    """A running cluster, given by its home directory."""

    home: Path

    def variables(self) -> dict[str, str]:
        """Return the environment variables that spark-submit needs."""
        return {
            "HADOOP_CONF_DIR": str(self.home / "conf"),
            "SPARK_CONF_DIR": str(self.home / "spark-conf"),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_PYTHON": sys.executable,  # the driver's own, in client mode
        }

    def submit(
        self,
        script: Path,
        *arguments: str,
        conf: Mapping[str, str] = {},
        mode: str = "cluster",
        timeout_s: float = 240.0,
    ) -> Submitted:
        """Run spark-submit in cluster or client mode with this Python, and wait for its end."""
        before = set(self._applications())
        environment = {**os.environ, **self.variables()}
        for name in ("SPARK_HOME", "PYTHONPATH"):  # Spark would pass on PYTHONPATH
            environment.pop(name, None)
        command = [str(PYSPARK / "bin/spark-submit"), "--master", "yarn", "--deploy-mode", mode]
        if mode == "client":  # the driver is our child; containers use Spark's defaults
            environment["PYTHONPATH"] = str(ROOT)
        else:  # SPARK_CONF_DIR precedes Spark's jars, so JVMs would not use archives of classes
            del environment["SPARK_CONF_DIR"]
            command += ["--properties-file", str(self.home / SPARK_DEFAULTS)]
        command += [f"--conf={key}={value}" for key, value in conf.items()]
        command += [str(script), *arguments]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        logs = [path for path in self._applications() if path not in before]
        texts = [
            f"==> {file}\n{file.read_text(errors='replace')}"
            for log in logs
            for file in sorted(log.rglob("std*"))
        ]
        return Submitted(done.returncode, done.stdout + done.stderr, "\n".join(texts))

    def _applications(self) -> list[Path]:
        return sorted(self.home.glob("nm*/logs/application_*"))


@dataclass(frozen=True)
class Daemon:
    """A process of ``start``, identified also by its start time, because pids are reused."""

    name: str
    pid: int
    start_time: int  # clock ticks after the boot

    def is_alive(self) -> bool:
        """Return whether the process runs."""
        return is_process_alive(ProcessIdentity(self.pid, self.start_time))


_children: dict[int, subprocess.Popen[bytes]] = {}  # daemons that this process has to wait for


@contextmanager
def mini_yarn(
    jars: Path, home: Path, nodes: int = 2, site: Mapping[str, object] = {}
) -> Iterator[Cluster]:
    """Run a cluster during the block; RuntimeError with the logs' names if it does not start.

    ``site`` has properties of yarn-site.xml that are added to the default ones or replace them.
    """
    try:
        yield start(home, jars, nodes, site)
    finally:
        stop(home)


def start(home: Path, jars: Path, nodes: int = 2, wanted: Mapping[str, object] = {}) -> Cluster:
    """Start a cluster that runs until ``stop``; remove the files of an earlier one in ``home``."""
    if is_running(home):
        raise RuntimeError(f"a cluster runs in {home}: stop it first")
    if " " in str(home):
        raise RuntimeError(f"{home}: a home has no spaces, Hadoop does without: --home DIRECTORY")
    if home.exists() and any(home.iterdir()) and not (home / STATE).exists():
        raise RuntimeError(f"{home} was not created by this program: name another directory")
    shutil.rmtree(home, ignore_errors=True)
    needed = classpath(jars)
    for folder in ("conf", "spark-conf", "tmp", "staging"):
        (home / folder).mkdir(parents=True)
    (home / "log4j2.properties").write_text(LOG4J)
    _write_spark_defaults(home)
    site, web = _site(home)
    site |= wanted
    _write_site(home / "conf", site)
    _write_site(home / "conf-rm", site)
    _write_xml(home / "conf-rm/capacity-scheduler.xml", CAPACITY)
    daemons = [_daemon(home, "rm", f"{SERVER}.resourcemanager.ResourceManager", needed)]
    _write_down(home, daemons)
    for number in range(1, nodes + 1):
        name = f"nm{number}"
        _write_site(home / f"conf-{name}", site | _node_site(home / name, number))
        daemons.append(_daemon(home, name, f"{SERVER}.nodemanager.NodeManager", needed))
        _write_down(home, daemons)
    try:
        _wait_for_nodes(web, nodes, daemons, home)
    except BaseException:
        stop(home)
        raise
    return Cluster(home)


def stop(home: Path) -> None:
    """End the daemons of ``start`` and all their containers. Idempotent."""
    daemons = _written_down(home)
    _end(daemons[1:])  # first, since a node ends its containers while the ResourceManager runs
    _end(daemons[:1])
    if daemons:
        _end_left_over(home)


def is_running(home: Path) -> bool:
    """Return whether any daemon of the cluster runs."""
    return any(daemon.is_alive() for daemon in _written_down(home))


def _write_down(home: Path, daemons: list[Daemon]) -> None:
    (home / STATE).write_text(json.dumps([asdict(daemon) for daemon in daemons]))


def _written_down(home: Path) -> list[Daemon]:
    try:
        return [Daemon(**each) for each in json.loads((home / STATE).read_text())]
    except FileNotFoundError:
        return []


CAPACITY: dict[str, object] = {
    "yarn.scheduler.capacity.root.queues": "default",
    "yarn.scheduler.capacity.root.default.capacity": 100,
    "yarn.scheduler.capacity.root.default.state": "RUNNING",
    "yarn.scheduler.capacity.maximum-am-resource-percent": "1.0",
    "yarn.scheduler.capacity.node-locality-delay": 0,
}


def _site(home: Path) -> tuple[dict[str, object], str]:
    """Return the properties of all daemons, and the ResourceManager's web address."""
    services = ("", ".scheduler", ".resource-tracker", ".admin", ".webapp")
    addresses = [f"127.0.0.1:{port}" for port in _free_ports(len(services), "127.0.0.1")]
    named = zip(services, addresses, strict=True)
    manager = {f"yarn.resourcemanager{name}.address": where for name, where in named}
    return {
        "fs.defaultFS": "file:///",
        "hadoop.tmp.dir": home / "tmp",
        "yarn.resourcemanager.hostname": "127.0.0.1",
        **manager,
        "yarn.scheduler.minimum-allocation-mb": 256,
        "yarn.scheduler.maximum-allocation-mb": 4096,
        "yarn.scheduler.include-port-in-node-name": "true",
        "yarn.resourcemanager.am.max-attempts": 2,
        "yarn.nodemanager.resource.memory-mb": 4096,
        "yarn.nodemanager.resource.cpu-vcores": 4,
        "yarn.nodemanager.vmem-check-enabled": "false",
        # If this is true (the default), cgroups limit memory, which do not exist in a container.
        "yarn.nodemanager.resource.memory.enforced": "false",
        "yarn.nodemanager.disk-health-checker.max-disk-utilization-per-disk-percentage": 99,
        "yarn.nodemanager.env-whitelist": "JAVA_HOME,PATH,LANG,TZ",
        "yarn.node-attribute.fs-store.root-dir": f"file://{home}/node-attribute",
        "yarn.application.classpath": "",  # Spark has all the jars that it needs
    }, addresses[-1]


def _node_site(folder: Path, number: int) -> dict[str, object]:
    host = f"127.0.0.{2 - number % 2}"
    ports = _free_ports(3, host)
    for part in ("local", "logs"):
        (folder / part).mkdir(parents=True)
    return {
        "yarn.nodemanager.hostname": host,
        "yarn.nodemanager.address": f"{host}:{ports[0]}",
        "yarn.nodemanager.localizer.address": f"{host}:{ports[1]}",
        "yarn.nodemanager.webapp.address": f"{host}:{ports[2]}",
        "yarn.nodemanager.local-dirs": folder / "local",
        "yarn.nodemanager.log-dirs": folder / "logs",
    }


def _write_spark_defaults(home: Path) -> None:
    """Write Spark's defaults: two small executors with this Python, loopback in all containers."""
    java = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    said = {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": ROOT}
    jars = PYSPARK / "jars"
    # A JVM uses an archive of Spark's classes only if its class path begins with Spark's jars.
    first = ":".join(map(str, [*jars.glob("slf4j-api-*.jar"), jars / "*"]))
    conf: dict[str, object] = {
        "spark.driver.extraClassPath": first,
        "spark.executor.extraClassPath": first,
        # Otherwise each submission zips and unpacks 400 MB.
        "spark.yarn.jars": f"local:{quote(str(PYSPARK))}/jars/*",
        "spark.yarn.stagingDir": f"file://{home}/staging",
        "spark.yarn.maxAppAttempts": 1,  # a failed application is not repeated
        "spark.ui.enabled": "false",
        "spark.driver.memory": "512m",
        "spark.driver.memoryOverhead": "1g",
        "spark.executor.memory": "512m",
        "spark.executor.memoryOverhead": "1g",
        "spark.executor.instances": 2,
        "spark.executor.cores": 2,
        "spark.driver.extraJavaOptions": java,
        "spark.executor.extraJavaOptions": java,
        **{f"spark.yarn.appMasterEnv.{name}": value for name, value in said.items()},
        **{f"spark.executorEnv.{name}": value for name, value in said.items()},
    }
    lines = [f"{key} {value}\n" for key, value in conf.items()]
    (home / SPARK_DEFAULTS).write_text("".join(lines))
    shutil.copy(ROOT / "conf/log4j2.properties", home / "conf")  # for all containers


def _daemon(home: Path, name: str, main: str, needed: list[str]) -> Daemon:
    java = Path(os.environ["JAVA_HOME"], "bin/java") if os.environ.get("JAVA_HOME") else "java"
    conf = home / f"conf-{name}"
    options = [
        f"-Dlog4j2.configurationFile={home}/log4j2.properties",
        f"-Djava.io.tmpdir={home}/tmp",
    ]
    command = [str(java), *JVM, *options, "-cp", ":".join([str(conf), *needed]), main]
    foreign = ("HADOOP_", "YARN_", "SPARK_")
    clean = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
    with (home / f"{name}.log").open("wb") as log:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=clean | {"HADOOP_CONF_DIR": str(conf)},
            cwd=home,
            start_new_session=True,
        )
    _children[child.pid] = child
    return Daemon(name, *identify_process(child.pid))


def _wait_for_nodes(web: str, nodes: int, daemons: list[Daemon], home: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while _active_nodes(web) < nodes:
        dead = [daemon for daemon in daemons if not daemon.is_alive()]
        if dead or time.monotonic() > deadline_s:
            raise RuntimeError(f"YARN did not start within {START_TIMEOUT_S} s; see {home}/*.log")
        time.sleep(0.2)


def _active_nodes(web: str) -> int:
    """Return the number of active nodes from JMX; REST answers of the shaded jars are malformed."""
    query = "jmx?qry=Hadoop:service=ResourceManager,name=ClusterMetrics"
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"http://{web}/{query}", timeout=10) as answer:
            beans = json.load(answer)["beans"]
    except OSError:
        return 0  # not listening yet
    return int(beans[0]["NumActiveNMs"]) if beans else 0


def _end(daemons: list[Daemon]) -> None:
    for daemon in daemons:
        _signal(daemon, signal.SIGTERM)
    deadline_s = time.monotonic() + STOP_TIMEOUT_S
    while any(daemon.is_alive() for daemon in daemons) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    for daemon in daemons:
        _signal(daemon, signal.SIGKILL)
        if child := _children.pop(daemon.pid, None):
            child.wait()


def _signal(daemon: Daemon, number: int) -> None:
    if daemon.is_alive():
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(daemon.pid, number)


def _end_left_over(home: Path) -> None:
    """End containers that outlived their NodeManager: processes that run in its directories."""
    places = [place.resolve() for place in home.glob("nm*/local")]
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with suppress(OSError):  # ended, or of another user
                works_in = Path(os.readlink(entry / "cwd"))
                if any(works_in.is_relative_to(place) for place in places):
                    os.kill(int(entry.name), signal.SIGKILL)
    shutil.rmtree(home / "staging", ignore_errors=True)


def _free_ports(count: int, host: str) -> list[int]:
    sockets = [socket.create_server((host, 0)) for _ in range(count)]
    ports = [int(listening.getsockname()[1]) for listening in sockets]
    for listening in sockets:
        listening.close()
    return ports


def _write_site(folder: Path, site: dict[str, object]) -> None:
    folder.mkdir(exist_ok=True)
    for name in ("core-site.xml", "yarn-site.xml"):
        _write_xml(folder / name, site)


def _write_xml(path: Path, properties: dict[str, object]) -> None:
    rows = [
        f"<property><name>{escape(name)}</name><value>{escape(str(value))}</value></property>\n"
        for name, value in properties.items()
    ]
    path.write_text(f"<configuration>\n{''.join(rows)}</configuration>\n")
