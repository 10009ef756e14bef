"""The media driver's process: one per key, its address and port, its start and its end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkstrom.base.errors import SetupError, UsageError
from sparkstrom.transport.aeron import driver_process
from sparkstrom.transport.aeron import media_driver as driver
from sparkstrom.transport.aeron.driver_directories import (
    ENDPOINT_FILE,
    hold_start_lock,
    identify_process,
    is_process_alive,
    resolve_home,
)
from sparkstrom.transport.aeron.media_driver import MediaDriverHandle, ensure_driver
from sparkstrom.transport.bind_address import choose_address, list_interface_addresses


def bound_sockets(children: str = "udp") -> dict[tuple[str, int], int]:
    """Return (address, port) -> inode of every bound UDP socket of this host."""
    table = {}
    for line in Path(f"/proc/net/{children}").read_text().splitlines()[1:]:
        fields = line.split()
        host, port = fields[1].split(":")
        words = [bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8)]
        kind = socket.AF_INET if children == "udp" else socket.AF_INET6
        table[socket.inet_ntop(kind, b"".join(words)), int(port, 16)] = int(fields[9])
    return table


def sockets_of(pid: int) -> set[int]:
    """Return the inodes of the sockets that a process has open."""
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # the process has closed it since
            link = os.readlink(f"/proc/{pid}/fd/{name}")
            if link.startswith("socket:["):
                inodes.add(int(link[8:-1]))
    return inodes


@pytest.fixture
def taken_socket() -> Iterator[socket.socket]:
    """A UDP socket that is bound to a port of loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder


def test_all_workers_of_a_key_share_one_driver(drivers: Any) -> None:
    first, second, other = drivers.ensure("a"), drivers.ensure("a"), drivers.ensure("b")
    assert (first.pid, first.endpoint, first.sizes) == (second.pid, second.endpoint, second.sizes)
    assert other.pid != first.pid
    assert other.endpoint != first.endpoint


def test_concurrent_requests_start_one_driver(drivers: Any) -> None:
    """Concurrent requests for one key start one driver."""
    with ThreadPoolExecutor(8) as pool:
        handles = list(pool.map(lambda _: drivers.ensure(), range(8)))
    assert len({handle.pid for handle in handles}) == 1


def test_driver_does_not_import_from_archives(
    drivers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's process imports nothing from archives on the path, such as Spark's jar."""
    archive = tmp_path / "spark.jar"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("json.py", "raise AssertionError('json was taken from an archive')")
    monkeypatch.syspath_prepend(str(archive))
    assert drivers.ensure().is_alive()


def test_driver_binds_endpoint_on_requested_address(drivers: Any) -> None:
    """The driver's process has bound the port of its endpoint on the requested address."""
    handle = drivers.ensure(host="127.0.0.2")
    published = json.loads((handle.directory / "endpoint.json").read_text())
    assert (
        (published["host"], published["port"])
        == handle.endpoint
        == ("127.0.0.2", handle.endpoint.port)
    )
    assert bound_sockets()[handle.endpoint] in sockets_of(handle.pid)


def test_driver_binds_address_chosen_by_mask(drivers: Any) -> None:
    """For each address of this host, a driver chosen by its mask binds this address."""
    for listed in list_interface_addresses():
        bits = 128 if ":" in listed.address else 32
        host = choose_address(f"{listed.address}/{bits}", None, list_interface_addresses())
        handle = drivers.ensure(listed.address.replace(":", "-"), host=host)
        children = "udp6" if ":" in host else "udp"
        assert bound_sockets(children)[listed.address, handle.endpoint.port] in sockets_of(
            handle.pid
        )


@pytest.mark.skipif(
    not any(":" in listed.address for listed in list_interface_addresses()),
    reason="no IPv6 on this host",
)
def test_frames_cross_ipv6(drivers: Any, exchange: Any) -> None:
    here, there = drivers.transport("a", host="::1"), drivers.transport("b", host="::1")
    there.open_receiver(1)
    sender = here.open_sender(there.endpoint, 1, control=False)
    assert exchange(here, sender, [b"six" * 5000], there) == [(1, b"six" * 5000)]


def test_taken_port_error_names_port(drivers: Any, taken_socket: socket.socket) -> None:
    """If the only allowed port is taken, the error names it."""
    port = taken_socket.getsockname()[1]
    with pytest.raises(SetupError, match=rf"UDP port {port} of 127\.0\.0\.1 .* is taken.*choose"):
        drivers.ensure(ports=(port, port))


def test_port_of_other_driver_is_rejected(drivers: Any) -> None:
    port = drivers.ensure("a").endpoint.port
    with pytest.raises(SetupError, match=f"UDP port {port} .* is taken"):
        drivers.ensure("b", ports=(port, port))


def test_driver_skips_taken_port_of_range(drivers: Any, taken_socket: socket.socket) -> None:
    port = taken_socket.getsockname()[1]
    bound = {number for _, number in bound_sockets()}
    handle = drivers.ensure(ports=(port, port + 20))
    free = (each for each in range(port + 1, port + 21) if each not in bound)
    assert handle.endpoint.port == next(free)


def test_preferred_port_is_used_only_inside_range(drivers: Any) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    assert drivers.ensure("a", port_preferred=free).endpoint.port == free
    assert (
        drivers.ensure("b", ports=(free + 1, free + 40), port_preferred=free).endpoint.port > free
    )


def test_an_address_of_another_host_is_refused(drivers: Any) -> None:
    """An address that this machine does not have is a SetupError."""
    with pytest.raises(
        SetupError, match=r"203\.0\.113\.9 cannot be bound .* address of this machine"
    ):
        drivers.ensure(host="203.0.113.9")


def test_failed_start_leaves_no_directory(drivers: Any) -> None:
    """A failed start leaves no directory."""
    with pytest.raises(SetupError):
        drivers.ensure(host="203.0.113.9")
    home = Path("/dev/shm") / f"sparkstrom-{os.getuid()}-{drivers.key('a')}"
    drivers.wait_until(lambda: not home.exists())


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import sys; sys.exit('boom')", r"ended without a word\nend of its log:\nboom"),
        ("import time; time.sleep(60)", "did not come up within its deadline"),
    ],
)
def test_failed_or_hanging_start_is_setup_error(
    drivers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str, words: str
) -> None:
    """A driver process that exits or hangs at its start is an error, with the end of its log."""
    (tmp_path / "broken_driver.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(driver, "DRIVER_PROCESS_MODULE", "broken_driver")
    with pytest.raises(SetupError, match=words):
        ensure_driver(drivers.key("a"), drivers.options(), timeout_s=1.0)
    assert not list(Path("/dev/shm").glob(f"*{drivers.key('a')}"))


def test_driver_that_misses_start_deadline_is_killed(
    drivers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A process that misses the deadline is killed: it could take the next attempt's port."""
    program = """
        import os, pathlib, time
        if not os.fork():
            pathlib.Path(__file__).with_name("pid").write_text(str(os.getpid()))
            time.sleep(60)
    """
    (tmp_path / "broken_driver.py").write_text(textwrap.dedent(program))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(driver, "DRIVER_PROCESS_MODULE", "broken_driver")
    with pytest.raises(SetupError, match="did not come up"):
        ensure_driver(drivers.key("a"), drivers.options(), timeout_s=3.0)
    pid = int((tmp_path / "pid").read_text())
    drivers.wait_until(lambda: not is_running(pid))


def is_running(pid: int) -> bool:
    """Return whether a process with this pid runs."""
    try:
        return is_process_alive(identify_process(pid))
    except ProcessLookupError:
        return False


def test_start_lock_timeout_names_lock_file(drivers: Any) -> None:
    """If another process holds the start lock for too long, the error names the lock."""
    home = resolve_home(drivers.key("a"), Path("/dev/shm"), Path("/tmp"))
    with hold_start_lock(home.path, 0) as locked:
        assert locked
        with pytest.raises(SetupError, match=rf"{home.path}/start.lock for 0.2 s"):
            ensure_driver(drivers.key("a"), drivers.options(), timeout_s=0.2)
        home.remove_dead_drivers()


def test_driver_files_are_private_to_user(drivers: Any) -> None:
    """Directories and files of a driver, except its log, have no permissions for others."""
    handle: MediaDriverHandle = drivers.ensure()
    for directory, _, files in os.walk(handle.home.path):
        assert os.stat(directory).st_mode & 0o077 == 0
        for name in files:
            if name != "driver.log":
                assert os.lstat(Path(directory) / name).st_mode & 0o077 == 0, name


def test_home_open_to_others_is_rejected(drivers: Any) -> None:
    """A home directory with permissions for others is a SetupError."""
    home = Path("/dev/shm") / f"sparkstrom-{os.getuid()}-{drivers.key('open')}"
    home.mkdir()
    home.chmod(0o755)
    try:
        with pytest.raises(SetupError, match="open to others"):
            drivers.ensure("open")
    finally:
        home.rmdir()


@pytest.mark.parametrize("key", ["", "a/b", "../x", "a" * 200])
def test_invalid_driver_key_is_rejected(key: str) -> None:
    """A key that is not a file name, or too long, is a UsageError."""
    with pytest.raises(UsageError, match="key"):
        ensure_driver(key)


def test_aeron_environment_variables_are_ignored(
    drivers: Any, exchange: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aeron's environment variables do not affect the driver and its clients."""
    monkeypatch.setenv("AERON_DIR", "/nonexistent")
    monkeypatch.setenv("AERON_THREADING_MODE", "INVOKER")
    monkeypatch.setenv("AERON_MTU_LENGTH", "17")
    transport = drivers.transport()
    transport.open_receiver(1)
    sender = transport.open_sender(transport.endpoint, 1, control=True)
    assert exchange(transport, sender, [b"fine"], transport) == [(1, b"fine")]


def test_driver_ends_after_last_client_closes(drivers: Any) -> None:
    """The driver ends after its last client, not after an earlier one."""
    first, second = drivers.ensure(), drivers.ensure()
    first.close()
    time.sleep(1.0)  # twice the linger of these tests
    assert second.is_alive()
    second.close()
    drivers.wait_until(lambda: not drivers.left_behind())


def test_new_client_within_linger_keeps_driver_running(drivers: Any) -> None:
    """A client that joins before the linger time is over keeps the driver running."""
    first = drivers.ensure()
    first.close()
    second = drivers.ensure()
    time.sleep(1.0)
    assert second.pid == first.pid
    assert second.is_alive()


def test_driver_survives_sighup_and_sigint(drivers: Any) -> None:
    """The driver has its own process group, and ignores SIGHUP and SIGINT."""
    handle = drivers.ensure()
    assert os.getpgid(handle.pid) != os.getpgid(0)
    for number in (signal.SIGHUP, signal.SIGINT):
        os.kill(handle.pid, number)
    time.sleep(0.3)
    assert handle.is_alive()


def test_driver_stays_in_session_of_starter(drivers: Any) -> None:
    """The driver stays in the session of its starter, and so in its scheduling group."""
    assert os.getsid(drivers.ensure().pid) == os.getsid(0)


def test_new_driver_waits_for_port_of_ending_driver(drivers: Any) -> None:
    """A driver that is ending is not joined; a new one waits until its port is free."""
    ending = drivers.ensure()
    drivers.stop(ending.pid)  # it simulates a driver that ends slowly
    (ending.directory / ENDPOINT_FILE).unlink()
    port = ending.endpoint.port
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(drivers.ensure, port_preferred=port)
        done, _ = wait([asked], timeout=1.0)
        os.kill(ending.pid, signal.SIGKILL)
        assert not done
        assert asked.result().endpoint.port == port
    assert asked.result().pid != ending.pid


def test_ending_driver_withdraws_endpoint_before_closing(tmp_path: Path) -> None:
    """A driver whose client has failed hides itself from new clients before it ends."""
    home = resolve_home("ending", tmp_path, tmp_path)
    with hold_start_lock(home.path, 1.0):
        directory = home.create_driver_directory(tmp_path)
    (directory / ENDPOINT_FILE).write_text("{}")
    broken = SimpleNamespace(do_client_work=lambda: False)
    order = {"watch": identify_process(os.getpid()), "linger_s": 60.0}
    driver_process.run_until_unneeded(
        broken, home, directory, order, SimpleNamespace(is_requested=False)
    )
    assert not (directory / ENDPOINT_FILE).exists()


FAILS_AFTER_READY = """
import json, os, sys
from contextlib import nullcontext
from pathlib import Path
from sparkstrom.base.errors import SetupError
from sparkstrom.transport.aeron import driver_process
from sparkstrom.transport.aeron.driver_directories import hold_start_lock, resolve_home

root = Path(sys.argv[1])
home = resolve_home("failing", root, root)
with hold_start_lock(home.path, 1.0):
    directory = home.create_driver_directory(root)
reading, status = os.pipe()

def fail_when_ready(*args):
    other = os.open(root / "other", os.O_WRONLY | os.O_CREAT)
    assert other == status, "the descriptor of the pipe is free, and something else's now"
    raise SetupError("failed after it was ready")

os.fork = lambda: 0
driver_process.MediaDriver = lambda *args: nullcontext()
driver_process.run_until_unneeded = fail_when_ready
settings = {"directory": str(directory), "home": [home.name, *map(str, home.roots)]}
try:
    driver_process.main([str(status), json.dumps(settings)])
except SetupError:
    print(os.read(reading, 100).decode(), (root / "other").stat().st_size)
"""


def test_failure_after_ready_is_not_written_to_reused_descriptor(
    tmp_path: Path,
) -> None:
    """A failure after the report of readiness is not written to a reused file descriptor."""
    done = subprocess.run(
        [sys.executable, "-c", FAILS_AFTER_READY, tmp_path], capture_output=True, text=True
    )
    assert done.stdout.split() == [driver_process.READY_MESSAGE.decode(), "0"], done.stderr


def test_sigterm_ends_driver_cleanly(drivers: Any) -> None:
    handle = drivers.ensure()
    os.kill(handle.pid, signal.SIGTERM)
    drivers.wait_until(lambda: not handle.is_alive() and not handle.directory.exists())


def test_exclusive_driver_ends_before_close_returns(drivers: Any) -> None:
    """With ``is_exclusive``, closing the client returns after the driver has ended."""
    handle = drivers.ensure(is_exclusive=True, linger_s=60.0)
    handle.close()
    assert not drivers.is_running(handle.pid)
    assert not drivers.left_behind()


def test_driver_ends_with_executor_despite_clients(drivers: Any) -> None:
    """The driver ends with the executor's process, even if it has clients."""
    with subprocess.Popen(["sleep", "60"]) as executor:
        handle = drivers.ensure(watch=identify_process(executor.pid))
        executor.kill()
    drivers.wait_until(lambda: not drivers.is_running(handle.pid) and not handle.directory.exists())


CLIENT = """
import json, os, sys, time
from sparkstrom.transport.aeron.media_driver import DriverOptions, ensure_driver
from sparkstrom.transport.aeron.client import AeronTransport
from sparkstrom.transport.aeron.driver_directories import resolve_home
from sparkstrom.transport.aeron.driver_directories import hold_start_lock
from sparkstrom.transport.aeron.driver_directories import identify_process
options = DriverOptions(watch=identify_process(1), linger_s=0.5)
transport = AeronTransport(ensure_driver(sys.argv[1], options))
transport.open_receiver(1)
print(transport._handle.pid, transport._handle.directory, flush=True)
time.sleep(60)
"""


def start_client(key: str) -> tuple[subprocess.Popen[str], int, Path]:
    """Start a client process; return it with its driver's pid and directory."""
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, key], stdout=subprocess.PIPE, text=True
    )
    assert client.stdout is not None
    pid, directory = client.stdout.readline().split()
    client.stdout.close()
    return client, int(pid), Path(directory)


def kill_client(client: subprocess.Popen[str]) -> None:
    """Kill the client process."""
    client.kill()
    client.wait()


def test_killed_last_client_leaves_no_driver_or_directory(drivers: Any) -> None:
    client, pid, directory = start_client(drivers.key("killed"))
    kill_client(client)
    drivers.wait_until(lambda: not drivers.is_running(pid) and not directory.parent.exists())


def test_next_start_removes_directories_of_dead_drivers(drivers: Any) -> None:
    """Starting a driver removes directories of dead drivers, not those of running ones."""
    client, pid, directory = start_client(drivers.key("killed"))
    os.kill(pid, signal.SIGKILL)
    kill_client(client)
    drivers.wait_until(lambda: not drivers.is_running(pid))
    assert directory.exists()
    bystander = drivers.ensure("alive")
    drivers.ensure("next")
    assert not directory.parent.exists()
    assert bystander.is_alive()
    assert bystander.directory.exists()
