"""The media driver's own process: bind a port, report it, and exit when no client needs the driver.

``python -m sparkstrom.transport.aeron.driver_process STATUS_FD SETTINGS`` is started only by
``media_driver.ensure_driver``. One native thread does Aeron's work. Python only checks, ten times a
second, whether the driver has clients and the executor is alive. The process imports only the
standard library and cffi, because the driver must be ready within a second.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

from sparkstrom.base.descriptors import wait_until_readable
from sparkstrom.base.errors import SetupError, SparkstromError, TransportError
from sparkstrom.base.identity import Endpoint
from sparkstrom.transport.aeron.channel_settings import (
    BufferSizes,
    probe_uri,
    random_session_id,
    subscription_uri,
)
from sparkstrom.transport.aeron.driver_directories import (
    AERON_DIRECTORY,
    CLIENTS_LOCK,
    DRIVER_LOCK,
    ENDPOINT_FILE,
    DriverHome,
    ProcessIdentity,
    hold_start_lock,
    is_process_alive,
    open_lock,
    try_lock,
    unlock,
)
from sparkstrom.transport.aeron.library import AeronLibrary, ffi
from sparkstrom.transport.aeron.media_driver import (
    ANCHOR_STREAM,
    PROBE_TERM_BYTES,
    READY_MESSAGE,
    connect_threadless_client,
    do_client_work,
    driver_info,
    loopback_self_test,
)

EPHEMERAL_PORT_ATTEMPTS = 16


def candidate_ports(host: str, ports: range | None, preferred: int | None) -> Iterator[int]:
    """Yield UDP ports of ``host`` that are free now, best first.

    The ``preferred`` port comes first, unless it is outside ``ports``. Then come all of ``ports``
    or, if that is None, some ephemeral ports. Aeron binds a port a moment later, so the caller must
    be ready to try the next one. Raise SetupError if the host's address cannot be bound.
    """
    if preferred and (ports is None or preferred in ports) and find_free_port(host, preferred):
        yield preferred
    if ports is not None:
        yield from (port for port in ports if find_free_port(host, port))
        return
    for _ in range(EPHEMERAL_PORT_ATTEMPTS):
        if port := find_free_port(host, 0):
            yield port


def find_free_port(host: str, port: int) -> int:
    """Return ``port`` if it can be bound now, or 0 if it is taken; for ``port`` 0, any free port.

    Raise SetupError if the address is not this machine's or the port is not permitted.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return 0
            raise SetupError(
                f"UDP port {port} of {host} cannot be bound on {socket.gethostname()}: "
                f"{error.strerror}; choose an address of this machine and a port you may use"
            ) from error
        return int(probe.getsockname()[1])


def no_free_port_message(host: str, ports: range | None) -> str:
    """Return the error message for the case that no candidate port was free."""
    if ports is None:
        return (
            f"no free UDP port on {host} in {EPHEMERAL_PORT_ATTEMPTS} attempts: too many are in use"
        )
    first, last = ports[0], ports[-1]
    which = f"UDP port {first}" if first == last else f"every UDP port from {first} to {last}"
    return (
        f"{which} of {host} on {socket.gethostname()} is taken: end the program that has it, "
        "choose another, or leave the port open to get any free one"
    )


CLIENT_POLL_S = 0.1
BIND_TIMEOUT_S = 5.0
CLEANUP_TIMEOUT_S = 1.0

MS = 1_000_000  # ns
KIB, MIB = 1024, 1024 * 1024

SHARED_THREADING_MODE = 2  # AERON_THREADING_MODE_SHARED

# Settings of every driver besides its sizes. All are set, so that neither another build's defaults
# nor environment variables have an effect. The timeouts are long enough that a starved two-core
# executor does not lose its client.
DRIVER_SETTINGS: tuple[tuple[str, Any], ...] = (
    ("dir_delete_on_start", False),
    ("dir_delete_on_shutdown", False),
    ("dir_warn_if_exists", False),
    ("threading_mode", SHARED_THREADING_MODE),
    ("native_resource_agent_idle_strategy_init_args", b"50ms"),
    ("native_resource_agent_idle_strategy", b"sleep-ns"),
    ("term_buffer_sparse_file", False),
    # A full file system is an error and not a SIGBUS.
    ("perform_storage_checks", True),
    ("mtu_length", 1408),
    ("rcv_status_message_timeout_ns", 200 * MS),
    ("timer_interval_ns", 100 * MS),
    ("image_liveness_timeout_ns", 5000 * MS),
    ("publication_connection_timeout_ns", 3000 * MS),
    ("publication_linger_timeout_ns", 1000 * MS),
    ("client_liveness_timeout_ns", 20_000 * MS),
    ("publication_unblock_timeout_ns", 40_000 * MS),
    ("driver_timeout_ms", 10_000),
    # A receiver requests a gap after 1 ms, and then every 50 ms. Aeron's default, 100 us, fills a
    # link of 1 Mbit/s with requests alone: 86 KB/s were measured, and nodes lost contact.
    ("nak_unicast_delay_ns", 1 * MS),
    ("nak_unicast_retry_delay_ratio", 50),
    # Ignore repeated requests for this long, which is as long as a slow link's queue may be. With 2
    # ms a lost datagram was sent a hundred times on 10 Mbit/s. If the retransmission is lost too,
    # the request for the next gap ends the wait.
    ("retransmit_unicast_linger_ns", 250 * MS),
    ("counters_buffer_length", 1 * MIB),
    ("error_buffer_length", 4 * MIB),
    ("to_conductor_buffer_length", 1 * MIB + 768),
    ("to_clients_buffer_length", 1 * MIB + 128),
    ("loss_report_buffer_length", 1 * MIB),
    # Publishers per stream: all workers publish to the controller's join stream.
    ("stream_session_limit", 1024),
    # A broken stream stays broken, and its sender opens another one.
    ("rejoin_stream", False),
    ("reliable_stream", True),
    ("spies_simulate_connection", False),
    ("print_configuration", False),
)


def main(arguments: list[str]) -> int:
    """Detach from the starting process, then run the driver; report through the status pipe.

    Args:
        arguments: descriptor of the status pipe, and the settings as JSON.

    Returns:
        The exit code: 1 if the driver could not start.
    """
    if os.fork():
        return 0
    status, settings = int(arguments[0]), json.loads(arguments[1])
    os.umask(0o077)
    os.chdir("/")
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop = StopSignal()
    directory = Path(settings["directory"])
    home = DriverHome(settings["home"][0], tuple(map(Path, settings["home"][1:])))
    lock = open_lock(directory / DRIVER_LOCK)
    assert try_lock(lock), f"{directory} has a media driver already"
    try:
        with ExitStack() as started:
            try:
                driver = started.enter_context(MediaDriver(settings, directory))
                os.write(status, READY_MESSAGE)
            except SparkstromError as error:
                os.write(status, str(error).encode())
                return 1
            finally:
                os.close(status)
            run_until_unneeded(driver, home, directory, settings, stop)
    finally:
        with hold_start_lock(home.path, CLEANUP_TIMEOUT_S) as locked:
            shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)
            if locked:
                home.remove_dead_drivers()
    return 0


class StopSignal:
    """A flag that SIGTERM sets; the signal also ends ``wait``."""

    def __init__(self) -> None:
        """Install the handler of SIGTERM, and a pipe that wakes ``wait``."""
        self.is_requested = False
        self._read_end, write_end = os.pipe()
        for end in (self._read_end, write_end):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(write_end)
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def wait(self, seconds: float) -> None:
        """Wait until the signal arrives, up to ``seconds``."""
        wait_until_readable(self._read_end, seconds)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """Record that SIGTERM has arrived."""
        self.is_requested = True


class MediaDriver:
    """The C driver, and a client with one subscription (the anchor), which keeps the port bound."""

    def __init__(self, settings: dict[str, Any], directory: Path) -> None:
        """Load the Aeron library; ``directory`` will hold the driver's files.

        ``settings`` are the values that ``media_driver.ensure_driver`` passes to this process.
        """
        self._aeron = AeronLibrary(settings["library"])
        self._settings = settings
        self._directory = directory
        self._exit_stack = ExitStack()
        self._client: Any = None

    def __enter__(self) -> MediaDriver:
        """Start the driver, bind its port, and write the file by which clients join it."""
        try:
            sizes = BufferSizes(**self._settings["sizes"])
            self._start_driver(sizes)
            directory = self._directory / AERON_DIRECTORY
            self._client = connect_threadless_client(
                self._aeron, directory, "anchor", self._exit_stack
            )
            endpoint = self._bind_port()
            write_driver_info(self._directory / ENDPOINT_FILE, driver_info(endpoint, sizes))
        except BaseException:
            self._exit_stack.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        """Close the client and stop the driver."""
        self._exit_stack.close()

    def do_client_work(self) -> bool:
        """Do the anchor client's periodic work; return False once it or the driver has failed."""
        return do_client_work(self._aeron, self._client)

    def _start_driver(self, sizes: BufferSizes) -> None:
        """Configure and start Aeron's driver, whose thread runs in this process."""
        lib, checked = self._aeron.lib, self._aeron.check_result
        if loss := self._settings["datagram_loss"]:
            os.environ["AERON_UDP_CHANNEL_INCOMING_INTERCEPTORS"] = "loss"
            os.environ["AERON_UDP_CHANNEL_TRANSPORT_BINDINGS_LOSS_ARGS"] = loss
        out = ffi.new("aeron_driver_context_t **")
        checked(lib.aeron_driver_context_init(out), "making the media driver's context")
        context = out[0]
        self._exit_stack.callback(lib.aeron_driver_context_close, context)
        for name, value in (*DRIVER_SETTINGS, *self._sizing_settings(sizes)):
            setter = getattr(lib, f"aeron_driver_context_set_{name}")
            checked(setter(context, value), f"setting {name} to {value}")
        out = ffi.new("aeron_driver_t **")
        checked(lib.aeron_driver_init(out, context), "making the media driver")
        driver = out[0]
        self._exit_stack.callback(lib.aeron_driver_close, driver)
        checked(lib.aeron_driver_start(driver, False), "starting the media driver")

    def _sizing_settings(self, sizes: BufferSizes) -> tuple[tuple[str, Any], ...]:
        """Return the driver settings that depend on this machine, as (name, value) pairs."""
        idle = f"10-20-1us-{self._settings['park_us_max']}us"
        return (
            ("dir", os.fsencode(self._directory / AERON_DIRECTORY)),
            ("shared_idle_strategy_init_args", idle.encode()),
            ("shared_idle_strategy", b"backoff"),
            ("term_buffer_length", sizes.data_term),
            ("ipc_term_buffer_length", sizes.data_term),
            ("rcv_initial_window_length", sizes.window),
            ("socket_so_rcvbuf", sizes.receive_buffer),
            ("socket_so_sndbuf", sizes.send_buffer),
        )

    def _bind_port(self) -> Endpoint:
        """Bind and test the first port that works; raise SetupError if none does."""
        host = self._settings["host"]
        given = self._settings["ports"]
        ports = range(given[0], given[1] + 1) if given else None
        for port in candidate_ports(host, ports, self._settings["port_preferred"]):
            endpoint = Endpoint(host, port)
            try:
                anchor = self._add_anchor_subscription(endpoint)
            except TransportError as error:
                print(f"{endpoint} was taken meanwhile: {error}", file=sys.stderr)
                continue
            session = random_session_id()
            uri = probe_uri(endpoint, session, PROBE_TERM_BYTES)
            client, work = self._client, self.do_client_work
            loopback_self_test(self._aeron, client, anchor, uri, ANCHOR_STREAM, session, work)
            return endpoint
        raise SetupError(no_free_port_message(host, ports))

    def _add_anchor_subscription(self, endpoint: Endpoint) -> Any:
        """Subscribe at the endpoint, which binds its port; return the subscription."""
        lib, checked = self._aeron.lib, self._aeron.check_result
        adding = ffi.new("aeron_async_add_subscription_t **")
        added = ffi.new("aeron_subscription_t **")
        uri, operation = subscription_uri(endpoint).encode(), f"binding {endpoint}"
        checked(
            lib.aeron_async_add_subscription(
                adding, self._client, uri, ANCHOR_STREAM, *[ffi.NULL] * 4
            ),
            operation,
        )
        end_s = time.monotonic() + BIND_TIMEOUT_S
        while not checked(lib.aeron_async_add_subscription_poll(added, adding[0]), operation):
            if not self.do_client_work() or time.monotonic() > end_s:
                raise SetupError(f"{operation}: the media driver did not answer")
            time.sleep(0.0005)
        return added[0]


def write_driver_info(path: Path, info: dict[str, Any]) -> None:
    """Write ``info``, which clients need to join the driver, atomically to a JSON file."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(info))
    draft.replace(path)


def run_until_unneeded(
    driver: MediaDriver,
    home: DriverHome,
    directory: Path,
    settings: dict[str, Any],
    stop: StopSignal,
) -> None:
    """Run until SIGTERM, the executor's exit, a failure, or ``linger_s`` seconds without a client.

    Before returning, hide the driver from new clients. ``directory``, in ``home``, is the driver's
    own; ``settings`` also has the executor to watch.
    """
    executor, linger_s = ProcessIdentity(*settings["watch"]), settings["linger_s"]
    clients = open_lock(directory / CLIENTS_LOCK)
    seen_s = time.monotonic()
    while not stop.is_requested and is_process_alive(executor) and driver.do_client_work():
        if not try_lock(clients):
            seen_s = time.monotonic()
        else:
            unlock(clients)
            if time.monotonic() - seen_s > linger_s and hide_if_unused(home, clients):
                return
        stop.wait(CLIENT_POLL_S)
    hide_driver(home, directory)


def hide_if_unused(home: DriverHome, clients: int) -> bool:
    """Hide the driver from new clients if no client has locked the open file ``clients``.

    Return whether the driver is hidden; False also if another process holds the start lock.
    """
    with hold_start_lock(home.path, 0) as locked:
        if not locked or not try_lock(clients):
            return False
        home.clear_current()
        return True


def hide_driver(home: DriverHome, directory: Path) -> None:
    """Hide the driver in ``directory`` from new clients, which then wait for its exit.

    Do nothing if the start lock stays held, because a client is joining and will see the exit.
    """
    with hold_start_lock(home.path, CLEANUP_TIMEOUT_S) as locked:
        if locked:  # otherwise a client is joining, and will see the driver exit
            (directory / ENDPOINT_FILE).unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
