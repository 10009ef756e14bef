"""Faults in practice: killed and stalled drivers, lost datagrams, full shared memory."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sparkstrom.base.errors import DriverLost, SetupError
from sparkstrom.base.identity import Endpoint
from sparkstrom.transport.aeron.client import AeronTransport
from sparkstrom.transport.base import OfferResult

KIB, MIB = 1024, 1024 * 1024

CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "poll": lambda transport, sender: transport.poll(60),
    "offer": lambda transport, sender: sender.offer([b"x"]),
    "open_sender": lambda t, sender: t.open_sender(Endpoint("127.0.0.1", 9), 1, control=True),
    "open_receiver": lambda transport, sender: transport.open_receiver(99),
    "close_receiver": lambda transport, sender: transport.close_receiver(1),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_every_call_raises_driver_lost_after_driver_is_killed(
    drivers: Any, exchange: Any, call: Any
) -> None:
    """Each call raises DriverLost after the media driver was killed."""
    transport = drivers.transport()
    transport.open_receiver(1)
    sender = transport.open_sender(transport.endpoint, 1, control=False)
    exchange(transport, sender, [b"alive"], transport)
    pid = transport._handle.pid
    os.kill(pid, signal.SIGKILL)

    with pytest.raises(DriverLost, match=f"pid {pid}"):
        drivers.wait_until(lambda: call(transport, sender) == "never")


def test_no_call_blocks_while_driver_is_stopped(drivers: Any, exchange: Any) -> None:
    """No call blocks while the media driver is stopped: blocked nodes would lose their leases."""
    transport = drivers.transport()
    drivers.stop(transport._handle.pid)
    try:
        transport.open_receiver(1)
        sender = transport.open_sender(transport.endpoint, 1, control=False)
        assert transport.poll(0) == []
        assert sender.offer([b"x"]) == (0, OfferResult.UNCONNECTED)
    finally:
        os.kill(transport._handle.pid, signal.SIGCONT)
    assert exchange(transport, sender, [b"y"], transport) == [(1, b"y")]


def test_new_driver_takes_port_of_killed_driver(drivers: Any, exchange: Any) -> None:
    """A new driver takes the port of a killed one, whose directory is removed."""
    before, peer = drivers.transport("a"), drivers.transport("b")
    handle = before._handle
    peer.open_receiver(1)
    exchange(before, before.open_sender(peer.endpoint, 1, control=False), [b"first"], peer)
    os.kill(handle.pid, signal.SIGKILL)
    with pytest.raises(DriverLost):
        before.poll(60)
    before.close()
    after = drivers.transport("a", port_preferred=handle.endpoint.port)
    assert after.endpoint == handle.endpoint
    assert after._handle.directory != handle.directory
    assert not handle.directory.exists()
    sender = after.open_sender(peer.endpoint, 1, control=False)
    assert exchange(after, sender, [b"second"], peer) == [(1, b"second")]


def test_stalled_driver_is_killed_and_replaced_on_its_port(drivers: Any, exchange: Any) -> None:
    """A stalled driver, which holds lock and port, is killed and replaced when clients give up."""
    before, peer = drivers.transport("a"), drivers.transport("b")
    handle = before._handle
    drivers.stop(handle.pid)
    with pytest.raises(DriverLost, match="gave up"):
        before.poll(60)
    before.close()
    after = drivers.transport("a", port_preferred=handle.endpoint.port)
    assert after.endpoint == handle.endpoint
    drivers.wait_until(lambda: not drivers.is_running(handle.pid))
    peer.open_receiver(1)
    sender = after.open_sender(peer.endpoint, 1, control=False)
    assert exchange(after, sender, [b"again"], peer) == [(1, b"again")]


def test_new_sender_reaches_receiver_on_replaced_driver(drivers: Any, exchange: Any) -> None:
    """A new sender reaches a receiver whose media driver was killed and replaced."""
    here, there = drivers.transport("a"), drivers.transport("b")
    there.open_receiver(1)
    broken = here.open_sender(there.endpoint, 1, control=False)
    exchange(here, broken, [b"x"], there)
    os.kill(there._handle.pid, signal.SIGKILL)
    drivers.wait_until(lambda: not there._handle.is_alive())
    there.close()
    again = drivers.transport("b", port_preferred=there.endpoint.port)
    again.open_receiver(1)
    broken.close()
    sender = here.open_sender(again.endpoint, 1, control=False)
    assert exchange(here, sender, [b"y"], again) == [(1, b"y")]


def test_every_client_of_killed_driver_raises_driver_lost(drivers: Any) -> None:
    """Each client of a killed media driver raises DriverLost."""
    first, second = drivers.transport(), drivers.transport()
    os.kill(first._handle.pid, signal.SIGKILL)
    for transport in (first, second):
        with pytest.raises(DriverLost):
            transport.poll(60)


def test_transport_on_dead_driver_raises_driver_lost(drivers: Any) -> None:
    """Opening a transport on a dead driver raises DriverLost."""
    handle = drivers.ensure()
    os.kill(handle.pid, signal.SIGKILL)
    drivers.wait_until(lambda: not handle.is_alive())
    with pytest.raises(DriverLost):
        AeronTransport(handle)


def test_frames_arrive_intact_despite_datagram_loss(drivers: Any, exchange: Any) -> None:
    """Frames arrive complete and in order if 2% of datagrams are lost."""
    loss = "rate=0.02|seed=7|recv-msg-mask=0xF"
    here, there = drivers.transport("a"), drivers.transport("b", datagram_loss=loss)
    there.open_receiver(1)
    sender = here.open_sender(there.endpoint, 1, control=False)
    dice = random.Random(5)
    frames = [dice.randbytes(dice.randrange(1, here.max_frame_bytes)) for _ in range(150)]
    arrivals = exchange(here, sender, frames, there)
    assert [arrival.frame for arrival in arrivals] == frames
    assert there.counters()["driver_naks_sent"] > 0  # datagrams were lost and requested again


def test_lost_data_is_requested_again_at_limited_rate(drivers: Any) -> None:
    """Lost data are requested again at intervals: one per 100 us would fill a 1 Mbit/s link."""
    loss = "rate=0.9|seed=7|recv-msg-mask=0x2"  # loses 90% of data frames, but no others
    here, there = drivers.transport("a"), drivers.transport("b", datagram_loss=loss)
    there.open_receiver(1)
    sender = here.open_sender(there.endpoint, 1, control=False)
    frame = bytes(here.max_frame_bytes)
    drivers.wait_until(lambda: sender.offer([frame])[0] or here.poll(0))
    drivers.wait_until(lambda: there.counters()["driver_naks_sent"] or there.poll(0.01))
    before = there.counters()["driver_naks_sent"]
    assert there.poll(1.0) == []
    assert 1 <= there.counters()["driver_naks_sent"] - before <= 60


def test_frame_and_byte_counters_are_exact(drivers: Any, exchange: Any) -> None:
    """Counters of frames and bytes are exact, also after the sender was closed."""
    here, there = drivers.transport("a"), drivers.transport("b")
    there.open_receiver(1)
    sender = here.open_sender(there.endpoint, 1, control=False)
    exchange(here, sender, [b"x" * 5000] * 3, there)
    assert there.counters()["frames_received"] == 3
    assert there.counters()["bytes_received"] == 15_000
    assert there.counters()["fragments_discarded"] == 0
    assert here.counters()["driver_bytes_sent"] > 15_000
    assert here.counters()["frames_sent"] == 3
    assert here.counters()["bytes_sent"] == 15_000
    sender.close()
    here.poll(0)
    assert here.counters()["bytes_sent"] == 15_000
    here.close()
    assert here.counters()["bytes_sent"] == 15_000


@pytest.fixture
def small_memory(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A function that mounts a tmpfs of a given size in bytes and returns its path."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    mounted: list[Path] = []

    def mount(size: int) -> Path:
        place = tmp_path / f"memory-{len(mounted)}"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=1777", "tmpfs", str(place)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"a small tmpfs cannot be mounted here: {done.stderr.strip()}")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_full_shared_memory_and_scratch_is_a_setup_error(drivers: Any, small_memory: Any) -> None:
    """Without room in shared memory or scratch, starting a driver is a SetupError with hints."""
    memory, scratch = small_memory(8 * MIB), small_memory(4 * MIB)
    with pytest.raises(SetupError, match=r"8,388,608 bytes free.*4,194,304 bytes free.*--shm-size"):
        drivers.ensure(shared_memory=memory, scratch=scratch)
    assert [*memory.iterdir(), *scratch.iterdir()] == []


def test_logs_go_to_scratch_where_shared_memory_is_small(
    drivers: Any, small_memory: Any, tmp_path: Path, exchange: Any
) -> None:
    """Logs go to the scratch directory if shared memory is full."""
    memory = small_memory(1 * MIB)
    (memory / "filler").write_bytes(bytes(MIB))  # fills the file system
    transport = drivers.transport(shared_memory=memory, scratch=tmp_path)
    assert tmp_path in transport._handle.directory.parents
    transport.open_receiver(1)
    sender = transport.open_sender(transport.endpoint, 1, control=False)
    assert exchange(transport, sender, [b"on disk"], transport) == [(1, b"on disk")]


def test_less_shared_memory_shortens_longest_frames(drivers: Any, small_memory: Any) -> None:
    """With less shared memory, terms and so the longest frames are shorter."""
    frames = [
        drivers.transport(
            str(size), shared_memory=small_memory(size * MIB), edges=2, local_edges=2
        ).max_frame_bytes
        for size in (64, 36, 24)
    ]
    assert frames == [64 * KIB, 32 * KIB, 16 * KIB]


def test_shared_memory_that_fills_up_later_is_a_setup_error(
    drivers: Any, small_memory: Any
) -> None:
    """A sender raises SetupError if shared memory has filled up; the transport still works."""
    memory = small_memory(40 * MIB)
    transport = drivers.transport(shared_memory=memory, edges=1)
    status = os.statvfs(memory)
    (memory / "filler").write_bytes(bytes(status.f_bavail * status.f_frsize - MIB))
    sender = transport.open_sender(transport.endpoint, 1, control=False)

    with pytest.raises(SetupError, match="--shm-size"):
        drivers.wait_until(lambda: transport.poll(0.002) or sender.offer([b"x"])[0])
    assert transport.poll(0) == []  # the transport works without that sender
