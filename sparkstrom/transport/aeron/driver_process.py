"""The media driver's own process: bind, say so, and be gone when nobody needs it any more.

``python -m sparkstrom.transport.aeron.driver_process STATUS_FD ORDER`` is started by
``driver.ensure_driver`` only. Aeron's work is done by one native thread; Python sleeps beside it
and looks, ten times a second, whether there are clients and whether the executor lives.
Only the standard library and cffi are imported: the driver must be up within a second.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

from sparkstrom.base.errors import SetupError, SparkstromError, TransportError
from sparkstrom.base.identity import Endpoint
from sparkstrom.transport.aeron.answering import ANCHOR_STREAM
from sparkstrom.transport.aeron.channels import random_session, subscription_uri, trial_uri
from sparkstrom.transport.aeron.checked import Aeron, ffi
from sparkstrom.transport.aeron.driver import READY, facts_of
from sparkstrom.transport.aeron.homes import AERON, ENDPOINT, Home
from sparkstrom.transport.aeron.invoked import invoked_client, still_runs
from sparkstrom.transport.aeron.locks import (
    CLIENTS_LOCK,
    DRIVER_LOCK,
    open_lock,
    start_lock,
    try_lock,
    unlock,
)
from sparkstrom.transport.aeron.ports import candidate_ports, none_free
from sparkstrom.transport.aeron.processes import Watched, is_alive
from sparkstrom.transport.aeron.selftest import TERM_BYTES, loopback_self_test
from sparkstrom.transport.aeron.sizes import Sizes

LOOK_S = 0.1
BIND_DEADLINE_S = 5.0
TIDY_DEADLINE_S = 1.0

MS = 1_000_000  # ns
KIB, MIB = 1024, 1024 * 1024

SHARED = 2  # AERON_THREADING_MODE_SHARED

# Settings of every driver besides its sizes. All are set, so that no default of another build or
# stray environment variable acts. Timeouts: a starved two-core executor must not lose its client.
SETTINGS: tuple[tuple[str, Any], ...] = (
    ("dir_delete_on_start", False),
    ("dir_delete_on_shutdown", False),
    ("dir_warn_if_exists", False),
    ("threading_mode", SHARED),
    ("native_resource_agent_idle_strategy_init_args", b"50ms"),
    ("native_resource_agent_idle_strategy", b"sleep-ns"),
    ("term_buffer_sparse_file", False),  # a full file system is an error, never a SIGBUS
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
    # A receiver asks for what it misses after 1 ms, and then every 50 ms. Aeron's default, 100 us,
    # fills a link of 1 Mbit/s with requests alone: 86 KB/s were counted, and nodes fell silent.
    ("nak_unicast_delay_ns", 1 * MS),
    ("nak_unicast_retry_delay_ratio", 50),
    # For so long one answer does, as long as a slow link's queue may be. With 2 ms a lost datagram
    # went out a hundred times on 10 Mbit/s. Only an answer that is lost, too, costs the wait: the
    # next gap's request takes the one place over.
    ("retransmit_unicast_linger_ns", 250 * MS),
    ("counters_buffer_length", 1 * MIB),
    ("error_buffer_length", 4 * MIB),
    ("to_conductor_buffer_length", 1 * MIB + 768),
    ("to_clients_buffer_length", 1 * MIB + 128),
    ("loss_report_buffer_length", 1 * MIB),
    ("stream_session_limit", 1024),  # publishers on one stream: all executors' joining ones
    ("rejoin_stream", False),  # a stream that broke off stays broken: the sender opens another
    ("reliable_stream", True),
    ("spies_simulate_connection", False),
    ("print_configuration", False),
)


def main(arguments: list[str]) -> int:
    """Leave the starter's process family, then be the driver; report through the status pipe."""
    if os.fork():
        return 0
    status, order = int(arguments[0]), json.loads(arguments[1])
    os.umask(0o077)
    os.chdir("/")
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop = Stop()
    directory = Path(order["directory"])
    home = Home(order["home"][0], tuple(map(Path, order["home"][1:])))
    lock = open_lock(directory / DRIVER_LOCK)
    assert try_lock(lock), f"{directory} has a media driver already"
    try:
        with MediaDriver(order, directory) as driver:
            os.write(status, READY)
            os.close(status)
            serve(driver, home, directory, order, stop)
    except SparkstromError as error:
        os.write(status, str(error).encode())
        os.close(status)
        return 1
    finally:
        with start_lock(home.path, TIDY_DEADLINE_S) as locked:
            shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)
            if locked:
                home.tidy()
    return 0


class Stop:
    """Set by SIGTERM, which also ends a wait."""

    def __init__(self) -> None:
        self.asked = False
        self._woken, waker = os.pipe()
        for end in (self._woken, waker):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(waker)
        signal.signal(signal.SIGTERM, self._ask)

    def wait(self, seconds: float) -> None:
        """Until the signal; at most so long."""
        select.select([self._woken], [], [], seconds)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


class MediaDriver:
    """The C driver with a client of its own whose one subscription keeps the port bound."""

    def __init__(self, order: dict[str, Any], directory: Path) -> None:
        self._aeron = Aeron(order["library"])
        self._order = order
        self._directory = directory
        self._closing = ExitStack()
        self._client: Any = None

    def __enter__(self) -> MediaDriver:
        try:
            sizes = Sizes(**self._order["sizes"])
            self._start_driver(sizes)
            directory = self._directory / AERON
            self._client = invoked_client(self._aeron, directory, "anchor", self._closing)
            endpoint = self._bind()
            publish(self._directory / ENDPOINT, facts_of(endpoint, sizes))
        except BaseException:
            self._closing.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._closing.close()

    def keep_alive(self) -> bool:
        """Do the anchor client's duties; False once it or the driver's thread has given up."""
        return still_runs(self._aeron, self._client)

    def _start_driver(self, sizes: Sizes) -> None:
        lib, checked = self._aeron.lib, self._aeron.checked
        if self._order["datagram_loss"]:
            os.environ["AERON_UDP_CHANNEL_INCOMING_INTERCEPTORS"] = "loss"
            os.environ["AERON_UDP_CHANNEL_TRANSPORT_BINDINGS_LOSS_ARGS"] = self._order[
                "datagram_loss"
            ]
        holder = ffi.new("aeron_driver_context_t **")
        checked(lib.aeron_driver_context_init(holder), "making the media driver's context")
        context = holder[0]
        self._closing.callback(lib.aeron_driver_context_close, context)
        for name, value in (*SETTINGS, *self._own_settings(sizes)):
            setter = getattr(lib, f"aeron_driver_context_set_{name}")
            checked(setter(context, value), f"setting {name} to {value}")
        holder = ffi.new("aeron_driver_t **")
        checked(lib.aeron_driver_init(holder, context), "making the media driver")
        driver = holder[0]
        self._closing.callback(lib.aeron_driver_close, driver)
        checked(lib.aeron_driver_start(driver, False), "starting the media driver")

    def _own_settings(self, sizes: Sizes) -> tuple[tuple[str, Any], ...]:
        return (
            ("dir", os.fsencode(self._directory / AERON)),
            (
                "shared_idle_strategy_init_args",
                f"10-20-1us-{self._order['park_us_max']}us".encode(),
            ),
            ("shared_idle_strategy", b"backoff"),
            ("term_buffer_length", sizes.data_term),
            ("ipc_term_buffer_length", sizes.data_term),
            ("rcv_initial_window_length", sizes.window),
            ("socket_so_rcvbuf", sizes.receive_buffer),
            ("socket_so_sndbuf", sizes.send_buffer),
        )

    def _bind(self) -> Endpoint:
        host = self._order["host"]
        given = self._order["ports"]
        ports = range(given[0], given[1] + 1) if given else None
        for port in candidate_ports(host, ports, self._order["port_preferred"]):
            endpoint = Endpoint(host, port)
            try:
                anchor = self._add_anchor(endpoint)
            except TransportError as error:
                print(f"{endpoint} was taken in between: {error}", file=sys.stderr)
                continue
            self._test(endpoint, anchor)
            return endpoint
        raise SetupError(none_free(host, ports))

    def _add_anchor(self, endpoint: Endpoint) -> Any:
        lib, checked = self._aeron.lib, self._aeron.checked
        adding = ffi.new("aeron_async_add_subscription_t **")
        added = ffi.new("aeron_subscription_t **")
        uri, doing = subscription_uri(endpoint).encode(), f"binding {endpoint}"
        checked(
            lib.aeron_async_add_subscription(
                adding, self._client, uri, ANCHOR_STREAM, *[ffi.NULL] * 4
            ),
            doing,
        )
        end_s = time.monotonic() + BIND_DEADLINE_S
        while not checked(lib.aeron_async_add_subscription_poll(added, adding[0]), doing):
            if not self.keep_alive() or time.monotonic() > end_s:
                raise SetupError(f"{doing}: the media driver did not answer")
            time.sleep(0.0005)
        return added[0]

    def _test(self, endpoint: Endpoint, anchor: Any) -> None:
        session = random_session()
        uri = trial_uri(endpoint, session, TERM_BYTES)
        loopback_self_test(
            self._aeron, self._client, anchor, uri, ANCHOR_STREAM, session, self.keep_alive
        )


def publish(path: Path, facts: dict[str, Any]) -> None:
    """Write ``facts`` so that a reader sees all of them or no file."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(facts))
    draft.replace(path)


def serve(
    driver: MediaDriver, home: Home, directory: Path, order: dict[str, Any], stop: Stop
) -> None:
    """Return when it is time to go: asked to, executor gone, driver broken, or nobody here."""
    executor, linger_s = Watched(*order["watch"]), order["linger_s"]
    clients = open_lock(directory / CLIENTS_LOCK)
    seen_s = time.monotonic()
    while not stop.asked and is_alive(executor) and driver.keep_alive():
        if not try_lock(clients):
            seen_s = time.monotonic()
        else:
            unlock(clients)
            if time.monotonic() - seen_s > linger_s and forsake(home, directory, clients):
                return
        stop.wait(LOOK_S)
    withdraw(home, directory)


def forsake(home: Home, directory: Path, clients: int) -> bool:
    """Make sure that nobody joins a dying driver: decide and hide it under the start lock."""
    with start_lock(home.path, 0) as locked:
        if not locked or not try_lock(clients):
            return False
        home.forget_current()
        return True


def withdraw(home: Home, directory: Path) -> None:
    """Let nobody join any more; whoever needs a driver now waits for this one's end."""
    with start_lock(home.path, TIDY_DEADLINE_S) as locked:
        if locked:  # otherwise somebody joins just now, and will see the driver end
            (directory / ENDPOINT).unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
