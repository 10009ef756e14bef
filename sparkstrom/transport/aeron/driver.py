"""One C media driver per (executor, job), in a process of its own, started by whoever needs it.

A worker asks for the driver of its executor's key. Under the start lock it joins the living one
or starts another, and holds a shared lock on it from then on. The driver's process ends itself:
when nobody has held that lock for some seconds, or when the executor is gone.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sparkstrom.base.errors import SetupError
from sparkstrom.base.identity import Endpoint
from sparkstrom.transport.aeron.checked import harmless
from sparkstrom.transport.aeron.homes import AERON, ENDPOINT, LOG, Home, home_for, is_usable, sweep
from sparkstrom.transport.aeron.library import load_library
from sparkstrom.transport.aeron.locks import (
    CLIENTS_LOCK,
    DRIVER_LOCK,
    RETRY_S,
    is_held,
    open_lock,
    start_lock,
    try_lock,
    unlock,
)
from sparkstrom.transport.aeron.processes import Watched, find_executor, is_alive, watched
from sparkstrom.transport.aeron.sizes import (
    LogDirectory,
    Sizes,
    choose_place,
    choose_sizes,
    place,
    socket_limits,
)

log = logging.getLogger(__name__)

PROCESS_MODULE = "sparkstrom.transport.aeron.driver_process"
LOG_TAIL_BYTES = 2000
DRIVER_STALL_MS = 10_000  # without a sign of life for so long, clients give a driver up
WAKING_S = 0.5
ENDING_S = 5.0  # a driver that ends may take so long to free its port
GONE_LOOK_S = 0.002
SHARED_MEMORY = Path("/dev/shm")


def _temporary() -> Path:
    return Path(tempfile.gettempdir())


@dataclass(frozen=True, slots=True)
class DriverOptions:
    """What a media driver shall be like. Workers that share one pass equal options."""

    host: str = "127.0.0.1"  # address of this machine to bind, IPv4 or IPv6
    ports: tuple[int, int] | None = None  # first and last: take the first free one of these
    port_preferred: int | None = None  # of the driver that died: peers know it
    edges: int = 8  # neighbours on other drivers to have room for
    local_edges: int = 0  # pairs of neighbours that are both on this one
    scratch: Path = field(default_factory=_temporary)  # where shared memory has no room
    shared_memory: Path = SHARED_MEMORY
    watch: Watched | None = None  # end with this process; None: the executor's JVM
    linger_s: float = 4.0  # wait so long for another client: gone within 5 s of the last
    alone: bool = False  # one client has it to itself: it ends before that one's close returns
    park_us_max: int = 1000  # longest rest of the idle driver; shorter is quicker and costs CPU
    datagram_loss: str = ""  # faults for tests, e.g. "rate=0.02|seed=7|recv-msg-mask=0xF"


@dataclass(slots=True)
class DriverHandle:
    """A living media driver that this process is a client of, until ``close``."""

    directory: Path  # ours; Aeron's own is aeron_directory
    endpoint: Endpoint
    pid: int
    sizes: Sizes
    home: Home = field(repr=False)
    driver_lock: int = field(repr=False)
    clients_lock: int = field(repr=False)
    alone: bool = False

    @property
    def aeron_directory(self) -> Path:
        """What Aeron clients are pointed at."""
        return self.directory / AERON

    def is_alive(self) -> bool:
        """Whether the driver's process still runs; one system call."""
        if self.driver_lock < 0 or not try_lock(self.driver_lock, shared=True):
            return self.driver_lock >= 0
        unlock(self.driver_lock)
        return False

    def log_tail(self) -> str:
        """The end of the driver's log."""
        return _log_tail(self.directory)

    def close(self) -> None:
        """Stop being a client; remove what is left where the driver is dead. Idempotent."""
        if self.driver_lock < 0:
            return
        alive = self.is_alive()
        ending = _ask_to_end(self.pid) if alive and self.alone else None
        for descriptor in (self.driver_lock, self.clients_lock):
            os.close(descriptor)
        self.driver_lock = self.clients_lock = -1
        if ending is not None:
            _await_gone(ending, time.monotonic() + ENDING_S)
        if not alive:
            with suppress(OSError, SetupError), start_lock(self.home.path, 0) as locked:
                if locked:  # otherwise somebody is starting the next driver, and tidies then
                    self.home.tidy()


def ensure_driver(
    key: str, options: DriverOptions | None = None, deadline_s: float = 15.0
) -> DriverHandle:
    """Join the living media driver of ``key``, or start one; return it once it is bound.

    ``key`` names executor and job, e.g. ``f"{application}-{job}-{executor}"``: the same for all
    workers that shall share, different for everybody else on the host. A driver that has stood
    still for longer than clients wait is ended and replaced. Raise SetupError, with the end of the
    driver's log, when it does not come up within the deadline.
    """
    options = options or DriverOptions()
    end_s = time.monotonic() + deadline_s
    home = home_for(key, options.shared_memory, options.scratch)
    with start_lock(home.path, deadline_s) as locked:
        if not locked:
            raise SetupError(
                f"another process has held {home.path}/start.lock for {deadline_s:g} s: it is "
                "stuck starting a media driver; end it"
            )
        directory = home.current()
        if directory is not None and _is_usable(directory) and not _ends_stalled(directory):
            return _join(home, directory, options)
        if directory is not None:
            _await_end(directory / DRIVER_LOCK, min(end_s, time.monotonic() + ENDING_S))
        try:
            return _join(home, _start(home, options, end_s), options)
        except BaseException:
            home.tidy()
            raise


def _is_usable(directory: Path) -> bool:
    # A driver that ends withdraws its endpoint first; its process, and its port, go a little later.
    return is_held(directory / DRIVER_LOCK) and (directory / ENDPOINT).exists()


def _ends_stalled(directory: Path) -> bool:
    """End a driver that has done nothing for so long that none of its clients waits any more.

    Who joined it would wait as long again, and nobody else could have its port.
    """
    pid = json.loads((directory / ENDPOINT).read_text())["pid"]
    if _is_active(directory):
        return False
    time.sleep(WAKING_S)  # the whole machine may have slept until just now
    if _is_active(directory):
        return False
    if is_held(directory / DRIVER_LOCK):  # otherwise it is gone, and its pid may be another's
        log.warning("the media driver (pid %d) stands still; ending it", pid)
        with suppress(ProcessLookupError):  # it ended in this very moment
            os.kill(pid, signal.SIGKILL)
    return True


def _is_active(directory: Path) -> bool:
    lib = load_library().lib
    aeron = os.fsencode(directory / AERON)
    return bool(lib.aeron_is_driver_active(aeron, DRIVER_STALL_MS, harmless(lib)))


def _await_end(driver_lock: Path, end_s: float) -> None:
    while is_held(driver_lock) and time.monotonic() < end_s:
        time.sleep(RETRY_S)


def _ask_to_end(pid: int) -> Watched | None:
    """Of a driver that just held its lock, so that the pid is its own; None where it is gone."""
    try:
        process = watched(pid)
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return None
    return process


def _await_gone(process: Watched, end_s: float) -> None:
    while is_alive(process) and time.monotonic() < end_s:
        time.sleep(GONE_LOOK_S)


def _join(home: Home, directory: Path, options: DriverOptions) -> DriverHandle:
    clients_lock = open_lock(directory / CLIENTS_LOCK)
    while not try_lock(clients_lock, shared=True):
        time.sleep(0.001)  # the driver is looking whether it has clients, without the start lock
    facts = json.loads((directory / ENDPOINT).read_text())
    return DriverHandle(
        directory,
        Endpoint(facts["host"], facts["port"]),
        facts["pid"],
        Sizes(**facts["sizes"]),
        home,
        open_lock(directory / DRIVER_LOCK),
        clients_lock,
        options.alone,
    )


def _start(home: Home, options: DriverOptions, end_s: float) -> Path:
    sweep(home.roots, besides=home.name)
    chosen, terms = room_for(options, home.roots)
    sizes = choose_sizes(options.edges, terms, socket_limits())
    directory = home.new_directory(chosen.root)
    _run(directory, home, options, sizes, end_s)
    home.set_current(directory)
    return directory


def room_for(
    options: DriverOptions, roots: tuple[Path, ...] | None = None
) -> tuple[LogDirectory, tuple[int, int]]:
    """Where logs would go now, and their term lengths. Raise SetupError where no place has room."""
    places = [place(root) for root in (_log_roots(options) if roots is None else roots)]
    return choose_place(places, options.edges + options.local_edges)


def _log_roots(options: DriverOptions) -> list[Path]:
    roots = (options.shared_memory, options.scratch)
    return [root for root in roots if is_usable(root)]


def _run(directory: Path, home: Home, options: DriverOptions, sizes: Sizes, end_s: float) -> None:
    """Start the process and wait for its one line: nothing means ready, anything else why not."""
    order = {
        "library": load_library().path,
        "directory": str(directory),
        "home": [home.name, *map(str, home.roots)],
        "host": options.host,
        "ports": options.ports,
        "port_preferred": options.port_preferred,
        "watch": options.watch or find_executor(),
        "linger_s": options.linger_s,
        "park_us_max": options.park_us_max,
        "datagram_loss": options.datagram_loss,
        "sizes": asdict(sizes),
    }
    ours, theirs = os.pipe()
    try:
        with (directory / LOG).open("wb") as log:
            starter = subprocess.Popen(
                [sys.executable, "-P", "-m", PROCESS_MODULE, str(theirs), json.dumps(order)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_clean_environment(),
                # Not the group that pyspark's daemon ends. The same session: Linux' autogroups,
                # one for each session, starved drivers that had one to themselves.
                process_group=0,
                pass_fds=(theirs,),
            )
        os.close(theirs)
        answer = _read_to_end(ours, end_s)
        starter.kill()  # it only forks; the driver is no child of ours, so no zombie later
        starter.wait()
    finally:
        os.close(ours)
    if answer != READY:
        raise SetupError(_failure(answer, directory))


READY = b"ready"


def _clean_environment() -> dict[str, str]:
    # A stray AERON_* variable silently changes a default of the library.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AERON_")}
    return kept | {"PYTHONPATH": os.pathsep.join(_import_path())}


def _import_path() -> list[str]:
    """Ours, without archives: Spark's jar is among them, and its 5,000 names are read for 0.1 s.

    What the driver's process imports is in none, save this package itself, where it is sent so.
    """
    home = Path(__file__).parents[3]
    entries = [os.path.abspath(entry) for entry in sys.path]
    return [entry for entry in entries if not os.path.isfile(entry) or Path(entry) == home]


def _read_to_end(descriptor: int, end_s: float) -> bytes:
    parts: list[bytes] = []
    while True:
        left_s = max(0.0, end_s - time.monotonic())
        if not select.select([descriptor], [], [], left_s)[0]:
            return b"it did not come up within its deadline"
        part = os.read(descriptor, 65536)
        if not part:
            return b"".join(parts)
        parts.append(part)


def _failure(answer: bytes, directory: Path) -> str:
    why = answer.decode(errors="replace") or "its process ended without a word"
    tail = _log_tail(directory)
    return f"the media driver did not start: {why}" + (f"\nend of its log:\n{tail}" if tail else "")


def _log_tail(directory: Path) -> str:
    try:
        content = (directory / LOG).read_bytes()
    except FileNotFoundError:
        return ""
    return content[-LOG_TAIL_BYTES:].decode(errors="replace").strip()


def facts_of(endpoint: Endpoint, sizes: Sizes) -> dict[str, Any]:
    """What ``endpoint.json`` says; written by the driver's process, read by ``ensure_driver``."""
    return {
        "host": endpoint.host,
        "port": endpoint.port,
        "pid": os.getpid(),
        "sizes": asdict(sizes),
    }
