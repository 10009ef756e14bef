"""Start, join and test the C media driver that the workers of one executor and job share.

A media driver is the Aeron process that sends and receives the datagrams of its clients. In this
package, "driver" always means a media driver; Spark's driver is called the driver program.

A key identifies the executor and the job. For each key there is a start lock, so that only one
process at a time looks for the key's driver. ``ensure_driver`` takes this lock and joins the living
driver or starts one. From then on it holds another lock, which all users of the driver share. The
driver exits when no process has held the shared lock for some seconds, or when the executor has
exited.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import struct
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from sparkstrom.base.child_processes import list_import_path, start_module
from sparkstrom.base.descriptors import wait_until_readable
from sparkstrom.base.errors import DriverLost, SetupError, first_line
from sparkstrom.base.identity import Endpoint
from sparkstrom.transport.aeron.channel_settings import (
    BufferSizes,
    LogDirectory,
    choose_buffer_sizes,
    choose_log_directory,
    measure_log_directory,
    probe_uri,
    random_session_id,
    read_socket_buffer_limits,
)
from sparkstrom.transport.aeron.driver_directories import (
    AERON_DIRECTORY,
    CLIENTS_LOCK,
    DRIVER_LOCK,
    ENDPOINT_FILE,
    LOCK_RETRY_S,
    LOG_FILE,
    DriverHome,
    ProcessIdentity,
    find_executor_process,
    hold_start_lock,
    identify_process,
    is_locked,
    is_process_alive,
    is_writable_directory,
    open_lock,
    remove_stale_homes,
    resolve_home,
    try_lock,
    unlock,
)
from sparkstrom.transport.aeron.library import AeronLibrary, ffi, load_library, no_op_callback

log = logging.getLogger(__name__)

DRIVER_PROCESS_MODULE = "sparkstrom.transport.aeron.driver_process"
LOG_TAIL_BYTES = 2000
DRIVER_TIMEOUT_MS = 10_000  # clients give up a driver that has had no heartbeat for this long
STALL_RECHECK_S = 0.5
EXIT_TIMEOUT_S = 5.0  # a driver that exits can take this long to free its port
EXIT_POLL_S = 0.002
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class DriverOptions:
    """Settings of a media driver. Workers that share a driver pass equal options."""

    host: str = "127.0.0.1"  # address of this machine to bind, IPv4 or IPv6
    # First and last UDP port to try; the first free one is used. None: any port.
    ports: tuple[int, int] | None = None
    port_preferred: int | None = None  # port of a driver that died, because peers know it
    edges: int = 8  # number of neighbours on other drivers, for which space is allocated
    local_edges: int = 0  # number of pairs of neighbours that both use this driver
    # Directory for logs that do not fit into shared memory.
    scratch: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    shared_memory: Path = SHARED_MEMORY  # directory for logs, if they fit
    watch: ProcessIdentity | None = None  # exit when this process exits; None: the executor's JVM
    linger_s: float = 4.0  # time to wait for a new client after the last has left
    is_exclusive: bool = False  # used by one client, whose ``close`` ends the driver
    # Longest sleep of the idle driver; shorter reduces latency and costs CPU.
    idle_sleep_us_max: int = 1000
    datagram_loss: str = ""  # fault injection in tests, e.g. "rate=0.02|seed=7|recv-msg-mask=0xF"


@dataclass(slots=True)
class MediaDriverHandle:
    """A media driver that this process uses as a client, until ``close`` is called."""

    directory: Path  # the driver's directory; Aeron's own is ``aeron_directory`` in it
    endpoint: Endpoint  # address and port that the driver has bound
    pid: int  # of the driver's process
    sizes: BufferSizes  # of the driver's logs and buffers
    home: DriverHome = field(repr=False)  # directories of all drivers of this key
    driver_lock: int = field(repr=False)  # descriptor to test whether the driver lives; -1: closed
    clients_lock: int = field(repr=False)  # descriptor with this client's shared lock
    is_exclusive: bool = False  # ``close`` ends the driver

    @property
    def aeron_directory(self) -> Path:
        """The directory that Aeron clients connect through."""
        return self.directory / AERON_DIRECTORY

    def is_alive(self) -> bool:
        """Return whether the driver's process runs; this takes one system call."""
        if self.driver_lock < 0 or not try_lock(self.driver_lock, shared=True):
            return self.driver_lock >= 0
        unlock(self.driver_lock)
        return False

    def log_tail(self) -> str:
        """Return the end of the driver's log."""
        return _read_log_tail(self.directory)

    def close(self) -> None:
        """Stop using the driver; clean up after it if it has died. Idempotent."""
        if self.driver_lock < 0:
            return
        is_alive = self.is_alive()
        process = _terminate_driver(self.pid) if is_alive and self.is_exclusive else None
        for descriptor in (self.driver_lock, self.clients_lock):
            os.close(descriptor)
        self.driver_lock = self.clients_lock = -1
        if process is not None:
            _wait_for_exit(process, time.monotonic() + EXIT_TIMEOUT_S)
        if not is_alive:
            with suppress(OSError, SetupError), hold_start_lock(self.home.path, 0) as locked:
                # otherwise another process is starting the next driver and will clean up
                if locked:
                    self.home.remove_dead_drivers()


def ensure_driver(
    key: str, options: DriverOptions | None = None, timeout_s: float = 15.0
) -> MediaDriverHandle:
    """Join the media driver of ``key`` or start one; return once its port is bound.

    A driver that has stalled for longer than its clients wait is killed and replaced.

    Args:
        key: names executor and job, such as ``f"{application}-{job}-{executor}"``: equal for all
            workers that share the driver, and otherwise unique on the host.
        options: settings, used only if the driver is started.
        timeout_s: maximum number of seconds to wait for the start lock and the driver.

    Raises:
        SetupError: the driver did not start in time; the message has the end of its log.
        DriverLost: the driver stalled while it was joined; the next call replaces it.
    """
    options = options or DriverOptions()
    end_s = time.monotonic() + timeout_s
    home = resolve_home(key, options.shared_memory, options.scratch)
    with hold_start_lock(home.path, timeout_s) as locked:
        if not locked:
            raise SetupError(
                f"another process has held {home.path}/start.lock for {timeout_s:g} s: it is "
                "stuck starting a media driver; end it"
            )
        directory = home.current()
        if (
            directory is not None
            and _accepts_clients(directory)
            and not _kill_if_stalled(directory)
        ):
            return _join_driver(home, directory, options)
        if directory is not None:
            _wait_for_unlock(directory / DRIVER_LOCK, min(end_s, time.monotonic() + EXIT_TIMEOUT_S))
        try:
            return _join_driver(home, _start_driver(home, options, end_s), options)
        except BaseException:
            home.remove_dead_drivers()
            raise


def _accepts_clients(directory: Path) -> bool:
    """Return whether the driver in ``directory`` runs and is not exiting."""
    # An exiting driver first removes its endpoint file, then frees its port and exits.
    return is_locked(directory / DRIVER_LOCK) and (directory / ENDPOINT_FILE).exists()


def _kill_if_stalled(directory: Path) -> bool:
    """Kill a driver whose heartbeat is too old for its clients; return whether it was too old.

    Clients could not join such a driver, and its port could not be reused.
    """
    pid = json.loads((directory / ENDPOINT_FILE).read_text())["pid"]
    if _is_driver_active(directory):
        return False
    time.sleep(STALL_RECHECK_S)  # the whole machine may have been suspended until just now
    if _is_driver_active(directory):
        return False
    if is_locked(directory / DRIVER_LOCK):  # otherwise it has exited and its pid may be reused
        log.warning("the media driver (pid %d) has stalled; killing it", pid)
        with suppress(ProcessLookupError):  # it has just exited
            os.kill(pid, signal.SIGKILL)
    return True


def _is_driver_active(directory: Path) -> bool:
    """Return whether the driver has updated its heartbeat within DRIVER_TIMEOUT_MS."""
    lib = load_library().lib
    aeron = os.fsencode(directory / AERON_DIRECTORY)
    return bool(lib.aeron_is_driver_active(aeron, DRIVER_TIMEOUT_MS, no_op_callback(lib)))


def _wait_for_unlock(driver_lock: Path, end_s: float) -> None:
    """Wait until the driver has released its lock, at most until ``end_s`` (monotonic)."""
    while is_locked(driver_lock) and time.monotonic() < end_s:
        time.sleep(LOCK_RETRY_S)


def _terminate_driver(pid: int) -> ProcessIdentity | None:
    """Send SIGTERM to a driver that held its lock a moment ago, and return its identity.

    Return None if the driver has exited.
    """
    try:
        process = identify_process(pid)
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return None
    return process


def _wait_for_exit(process: ProcessIdentity, end_s: float) -> None:
    """Wait until the process has exited, at most until ``end_s`` (monotonic)."""
    while is_process_alive(process) and time.monotonic() < end_s:
        time.sleep(EXIT_POLL_S)


def _join_driver(home: DriverHome, directory: Path, options: DriverOptions) -> MediaDriverHandle:
    """Lock the driver in ``directory`` as a client, and return its handle.

    Raise DriverLost if the driver has stalled; the next ``ensure_driver`` then kills it.
    """
    clients_lock = open_lock(directory / CLIENTS_LOCK)
    end_s = time.monotonic() + DRIVER_TIMEOUT_MS / 1000
    while not try_lock(clients_lock, shared=True):  # it is checking for clients
        if time.monotonic() > end_s:
            os.close(clients_lock)
            raise DriverLost("joining the media driver", 0, "it has stalled")
        time.sleep(0.001)
    info = json.loads((directory / ENDPOINT_FILE).read_text())
    return MediaDriverHandle(
        directory,
        Endpoint(info["host"], info["port"]),
        info["pid"],
        BufferSizes(**info["sizes"]),
        home,
        open_lock(directory / DRIVER_LOCK),
        clients_lock,
        options.is_exclusive,
    )


def _start_driver(home: DriverHome, options: DriverOptions, end_s: float) -> Path:
    """Start a media driver in a new directory, which ``ensure_driver`` then finds in ``home``.

    Return the directory. First remove what dead drivers left in other homes. Raise SetupError
    unless the driver is ready by ``end_s`` (monotonic).
    """
    remove_stale_homes(home.roots, keep=home.name)
    log_directory, terms = find_log_space(options, home.roots)
    sizes = choose_buffer_sizes(options.edges, terms, read_socket_buffer_limits())
    directory = home.create_driver_directory(log_directory.root)
    _launch_process(directory, home, options, sizes, end_s)
    home.set_current(directory)
    return directory


def find_log_space(
    options: DriverOptions, roots: tuple[Path, ...] | None = None
) -> tuple[LogDirectory, tuple[int, int]]:
    """Return the directory that would hold the logs now, and its (data, control) term lengths.

    ``roots`` are the directories to choose from; None: shared memory and scratch, if writable.
    Raise SetupError if no directory has enough room.
    """
    if roots is None:
        roots = tuple(filter(is_writable_directory, (options.shared_memory, options.scratch)))
    directories = [measure_log_directory(root) for root in roots]
    return choose_log_directory(directories, options.edges + options.local_edges)


def _launch_process(
    directory: Path, home: DriverHome, options: DriverOptions, sizes: BufferSizes, end_s: float
) -> None:
    """Start the driver's process; raise SetupError unless it is ready by ``end_s`` (monotonic)."""
    settings = {
        "library": load_library().path,
        "directory": str(directory),
        "home": [home.name, *map(str, home.roots)],
        "host": options.host,
        "ports": options.ports,
        "port_preferred": options.port_preferred,
        "watch": options.watch or find_executor_process(),
        "linger_s": options.linger_s,
        "park_us_max": options.idle_sleep_us_max,
        "datagram_loss": options.datagram_loss,
        "sizes": asdict(sizes),
    }
    try:
        read_end, write_end = os.pipe()
    except OSError as error:  # too many open files
        raise _cannot_start(error, directory) from error
    try:
        try:
            with (directory / LOG_FILE).open("wb") as log:
                # Not in the process group that pyspark's daemon kills, but in its session: Linux
                # autogroups, one per session, starved drivers that had a session of their own.
                starter = start_module(
                    DRIVER_PROCESS_MODULE,
                    [write_end],
                    json.dumps(settings),
                    output=log,
                    env=_driver_environment(),
                )
        except OSError as error:  # no memory, or too many processes or open files
            raise _cannot_start(error, directory) from error
        finally:
            os.close(write_end)
        try:
            status = _read_status(read_end, end_s)
            if status == TIMEOUT_MESSAGE:  # the driver is in the same group, and could still start
                os.killpg(starter.pid, signal.SIGKILL)
        finally:
            starter.kill()  # it only forks, so the driver is not our child and leaves no zombie
            starter.wait()
    finally:
        os.close(read_end)
    if status != READY_MESSAGE:
        raise SetupError(_format_start_failure(status, directory))


def _cannot_start(error: OSError, directory: Path) -> SetupError:
    """Return the error for a media driver whose process cannot be started."""
    reason = (
        f"its process cannot be started: {first_line(error)}; free memory on the host, or raise its"
        " limits on processes and open files (ulimit -u, ulimit -n)"
    )
    return SetupError(_format_start_failure(reason.encode(), directory))


READY_MESSAGE = b"ready"
TIMEOUT_MESSAGE = b"it did not come up within its deadline"


def _driver_environment() -> dict[str, str]:
    """Return the environment of the driver's process."""
    # Stray AERON_* variables would silently change the library's defaults.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AERON_")}
    return kept | {"PYTHONPATH": os.pathsep.join(_import_path())}


def _import_path() -> list[str]:
    """Return ``sys.path`` without archives, except an archive that contains this package.

    One of them is Spark's jar, whose 5,000 names take 0.1 s to read. The driver's process needs
    nothing from the other archives.
    """
    home = Path(__file__).parents[3]
    return [each for each in list_import_path() if not os.path.isfile(each) or Path(each) == home]


def _read_status(descriptor: int, end_s: float) -> bytes:
    """Return all that the process writes to the pipe, or TIMEOUT_MESSAGE if ``end_s`` passes."""
    parts: list[bytes] = []
    while True:
        left_s = end_s - time.monotonic()
        if not wait_until_readable(descriptor, left_s):
            return TIMEOUT_MESSAGE
        part = os.read(descriptor, 65536)
        if not part:
            return b"".join(parts)
        parts.append(part)


def _format_start_failure(status: bytes, directory: Path) -> str:
    """Return the error message for a driver that did not start, with the end of its log."""
    reason = status.decode(errors="replace") or "its process ended without a word"
    tail = _read_log_tail(directory)
    shown = f"\nend of its log:\n{tail}" if tail else ""
    return f"the media driver did not start: {reason}{shown}"


def _read_log_tail(directory: Path) -> str:
    """Return the end of the driver's log; "" if it has none."""
    try:
        content = (directory / LOG_FILE).read_bytes()
    except FileNotFoundError:
        return ""
    return content[-LOG_TAIL_BYTES:].decode(errors="replace").strip()


def driver_info(endpoint: Endpoint, sizes: BufferSizes) -> dict[str, Any]:
    """Return the content of ``endpoint.json``, from which clients learn how to join this driver."""
    return {
        "host": endpoint.host,
        "port": endpoint.port,
        "pid": os.getpid(),
        "sizes": asdict(sizes),
    }


# The checks below use a client without a thread and without compiled kernels, because they run
# before anything is compiled.


def connect_threadless_client(
    aeron: AeronLibrary, aeron_directory: Path, name: str, closing: ExitStack
) -> Any:
    """Connect a client without a thread: the caller must call ``do_client_work`` periodically.

    Args:
        aeron: the Aeron library.
        aeron_directory: the driver's directory.
        name: client name, also used in errors.
        closing: stack that receives the callbacks which close the client.

    Returns:
        The C client.

    Raises:
        TransportError: no driver runs in the directory.
    """
    lib, checked = aeron.lib, aeron.check_result
    out = ffi.new("aeron_context_t **")
    checked(lib.aeron_context_init(out), f"making the {name} client's context")
    context = out[0]
    closing.callback(lib.aeron_context_close, context)
    for setting, value in (
        ("dir", os.fsencode(aeron_directory)),
        ("client_name", name.encode()),
        ("use_conductor_agent_invoker", True),
    ):
        setter = getattr(lib, f"aeron_context_set_{setting}")
        checked(setter(context, value), f"setting {setting}")
    # The default handler would end the process. ``do_client_work`` reports the same errors.
    checked(
        lib.aeron_context_set_error_handler(context, no_op_callback(lib), ffi.NULL),
        "setting the error handler",
    )
    out = ffi.new("aeron_t **")
    checked(lib.aeron_init(out, context), f"connecting the {name} client")
    closing.callback(lib.aeron_close, out[0])
    checked(lib.aeron_start(out[0]), f"starting the {name} client")
    return out[0]


def do_client_work(aeron: AeronLibrary, client: Any) -> bool:
    """Do the client's periodic work; return False once it or its media driver has failed."""
    lib = aeron.lib
    return lib.aeron_main_do_work(client) >= 0 and not lib.aeron_is_closed(client)


# Every media driver subscribes to this stream to keep its port bound. It carries no data.
ANCHOR_STREAM: Final = 0
ANSWER_POLL_S: Final = 0.001
DRIVER_ENDED: Final = "waiting for an answer", 0, "the media driver of this host has ended"
# Aeron's minimum, because every probe makes the other driver allocate a log of such terms.
PROBE_TERM_BYTES: Final = 65_536


def is_driver_reachable(handle: MediaDriverHandle, peer: Endpoint, seconds: float) -> bool:
    """Return whether the media driver at ``peer`` answers this host's driver within ``seconds``.

    A publication to the peer's anchor stream becomes connected when a status message replies to its
    setup datagrams, so one reply shows that both directions work. No data are sent.

    Raise DriverLost if this host's driver dies during the test, TransportError if it cannot send.
    """
    aeron = load_library()
    end_s = time.monotonic() + seconds
    with ExitStack() as closing:
        _require_alive(handle)
        client = connect_threadless_client(aeron, handle.aeron_directory, "probe", closing)
        uri = probe_uri(peer, random_session_id(), PROBE_TERM_BYTES)
        probe = _Publication(aeron, client, uri, ANCHOR_STREAM)
        while not probe.is_connected():
            _require_alive(handle)
            if not do_client_work(aeron, client):
                raise DriverLost(*DRIVER_ENDED)
            if time.monotonic() > end_s:
                probe.close()
                return False
            time.sleep(ANSWER_POLL_S)
        probe.close()
        do_client_work(aeron, client)
    return True


def _require_alive(handle: MediaDriverHandle) -> None:
    """Raise DriverLost if the driver's process has ended."""
    if not handle.is_alive():
        raise DriverLost(*DRIVER_ENDED)


class _Publication:
    """A publication that sends no data, or only the message of the self-test."""

    def __init__(self, aeron: AeronLibrary, client: Any, uri: str, stream: int) -> None:
        """Request the publication from the media driver of ``client``; ``is_open`` polls for it."""
        self._aeron, self._uri = aeron, uri
        adding = ffi.new("aeron_async_add_exclusive_publication_t **")
        add = aeron.lib.aeron_async_add_exclusive_publication
        aeron.check_result(add(adding, client, uri.encode(), stream), f"opening {uri}")
        self._adding = adding[0]
        self.publication: Any = None  # the C object, once open

    def is_open(self) -> bool:
        """Poll once; return whether this host's driver has added the publication."""
        if self.publication is None:
            added = ffi.new("aeron_exclusive_publication_t **")
            poll = self._aeron.lib.aeron_async_add_exclusive_publication_poll
            if self._aeron.check_result(poll(added, self._adding), f"opening {self._uri}"):
                self.publication = added[0]
        return self.publication is not None

    def is_connected(self) -> bool:
        """Poll once; return whether the other driver has answered."""
        lib = self._aeron.lib
        return self.is_open() and bool(
            lib.aeron_exclusive_publication_is_connected(self.publication)
        )

    def close(self) -> None:
        """Revoke the publication, so that no log of it remains on either side."""
        if self.publication is not None:
            revoke = self._aeron.lib.aeron_exclusive_publication_revoke
            self._aeron.check_result(revoke(self.publication, *_NO_CALLBACK), "closing")


SELF_TEST_TIMEOUT_S = 5.0
SELF_TEST_POLL_S = 0.0005
SELF_TEST_MESSAGE = b"sparkstrom"

# i32 frame_length | u8 version | u8 flags | u16 type | i32 term_offset | i32 session | i32 stream
# | i32 term_id | i64 reserved                                                    (little endian)
FRAME_HEADER = struct.Struct("<iBBHiiiiq")
UNFRAGMENTED_FLAGS = 0xC0

_NO_CALLBACK = (ffi.NULL, ffi.NULL)


class ReceivedFragment:
    """The fragment that the self-test's subscription received, and its header in two forms."""

    def __init__(self, aeron: AeronLibrary) -> None:
        """Create ``handler``, the C callback that stores a received fragment here."""
        self._aeron = aeron
        self.message = b""
        self.raw_header = self.header_values = b""
        self.handler = ffi.callback("aeron_fragment_handler_t", self._on_fragment)

    def _on_fragment(self, clientd: Any, payload: Any, length: int, header: Any) -> None:
        """Copy the payload, the raw header before it, and the header as Aeron decodes it."""
        self.message = bytes(ffi.buffer(payload, length))
        size = FRAME_HEADER.size
        self.raw_header = bytes(ffi.buffer(payload - size, size))
        values = ffi.new("char[64]")
        self._aeron.lib.aeron_header_values(header, values)
        self.header_values = bytes(ffi.buffer(values, size))


def loopback_self_test(
    aeron: AeronLibrary,
    client: Any,
    subscription: Any,
    uri: str,
    stream: int,
    session: int,
    do_work: Callable[[], bool],
) -> None:
    """Send one message to ``subscription`` and check that it arrives with the expected layout.

    The session id must be the same in the publication's constants, in the decoded header, and in
    the 32 bytes before the payload, from which the kernels read it.

    Args:
        aeron: the Aeron library.
        client: the C client.
        subscription: subscription of that client.
        uri: channel URI that leads to the subscription, with ``session``.
        stream: the subscription's stream number.
        session: the publication's session id.
        do_work: does the client's periodic work; returns whether the client still runs.

    Raises:
        SetupError: the message does not arrive, or the memory layout is not the expected one.
    """
    deadline = _Deadline(uri, do_work)
    opening = _Publication(aeron, client, uri, stream)
    while not opening.is_open():
        deadline.wait()
    publication = opening.publication
    lib, fragment = aeron.lib, ReceivedFragment(aeron)
    constants = ffi.new("aeron_publication_constants_t *")
    aeron.check_result(lib.aeron_exclusive_publication_constants(publication, constants), "reading")
    message = (SELF_TEST_MESSAGE, len(SELF_TEST_MESSAGE))
    while lib.aeron_exclusive_publication_offer(publication, *message, *_NO_CALLBACK) < 0:
        deadline.wait()
    while not lib.aeron_subscription_poll(subscription, fragment.handler, ffi.NULL, 1):
        deadline.wait()
    opening.close()
    _check_layout(aeron, fragment, constants, stream, session)


class _Deadline:
    """The time limit of a self-test."""

    def __init__(self, uri: str, do_work: Callable[[], bool]) -> None:
        """Start the time limit for the stream ``uri``; ``do_work`` does its client's work."""
        self._uri, self._do_work = uri, do_work
        self._end_s = time.monotonic() + SELF_TEST_TIMEOUT_S

    def wait(self) -> None:
        """Do the client's work and sleep briefly; raise SetupError once the time is over."""
        if not self._do_work() or time.monotonic() > self._end_s:
            raise SetupError(
                f"the media driver does not receive its own datagrams at {self._uri} within "
                f"{SELF_TEST_TIMEOUT_S:g} s: is UDP to the host's own address filtered, or the "
                "machine overloaded?"
            )
        time.sleep(SELF_TEST_POLL_S)


def _check_layout(
    aeron: AeronLibrary, fragment: ReceivedFragment, constants: Any, stream: int, session: int
) -> None:
    """Raise SetupError unless the fragment, its headers and the constants agree."""
    length, _, flags, kind, _, got_session, got_stream, *_ = FRAME_HEADER.unpack(
        fragment.raw_header
    )
    agrees = (
        fragment.message == SELF_TEST_MESSAGE
        and fragment.raw_header == fragment.header_values
        and (length, flags, kind)
        == (FRAME_HEADER.size + len(SELF_TEST_MESSAGE), UNFRAGMENTED_FLAGS, 1)
        and (got_session, got_stream) == (session, stream)
        and (constants.session_id, constants.stream_id) == (session, stream)
        and constants.term_buffer_length == PROBE_TERM_BYTES
    )
    if not agrees:
        raise SetupError(
            f"{aeron.path} ({aeron.version}) has another layout of frames or structs than "
            "sparkstrom reads: use the pinned library (`sparkstrom fetch-aeron`)"
        )
