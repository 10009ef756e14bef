"""Local streams: neighbours on one media driver, mostly in separate processes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sparkstrom.base.errors import DriverLost, UsageError
from sparkstrom.transport.aeron.channel_settings import DRIVER_OVERHEAD_BYTES, required_log_bytes
from sparkstrom.transport.aeron.client import AeronTransport
from sparkstrom.transport.base import OfferResult, Sender, Transport

THERE, BACK = 11, 12  # numbers of the streams to the neighbour and from it

NEIGHBOUR = """
import os, sys
from sparkstrom.transport.aeron.client import AeronTransport
from sparkstrom.transport.aeron.media_driver import DriverOptions, ensure_driver
from sparkstrom.transport.aeron.driver_directories import identify_process

key, executor, control, there, back = sys.argv[1], *map(int, sys.argv[2:])
options = DriverOptions(linger_s=0.5, watch=identify_process(executor))
transport = AeronTransport(ensure_driver(key, options))
transport.open_receiver(there, local=True)
sender = transport.open_sender(transport.endpoint, back, control=bool(control), local=True)
print("ready", flush=True)
waiting = []
for line in sys.stdin:
    if line == "hear\\n":
        while not (arrivals := transport.poll(1)):
            pass
        print(arrivals[0].frame.decode(), flush=True)
    elif line == "say\\n":
        waiting = [b"%d" % i * 1000 for i in range(20)]
        while waiting:
            del waiting[: sender.offer(waiting)[0]]
            transport.poll(0.001)
        print("said", flush=True)
    else:  # echo for good
        while True:
            waiting += [frame for _, frame in transport.poll(0 if waiting else 0.05)]
            del waiting[: sender.offer(waiting)[0]]
"""


class Neighbour(NamedTuple):
    """Another process on the same media driver."""

    process: subprocess.Popen[str]

    def ask(self, order: str) -> str:
        """Send an order (hear, say, echo) to the process; return its answer, if it gives one."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()
        return "" if order == "echo" else self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


StartNeighbour = Callable[..., Neighbour]


@pytest.fixture
def neighbour(drivers: Any) -> Iterator[StartNeighbour]:
    """A function that starts a process that obeys ``Neighbour.ask``."""
    started: list[Neighbour] = []

    def start(*, control: bool = False, streams: tuple[int, int] = (THERE, BACK)) -> Neighbour:
        facts = [drivers.key("a"), os.getpid(), int(control), *streams]
        process = subprocess.Popen(
            [sys.executable, "-c", NEIGHBOUR, *map(str, facts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(Neighbour(process))
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return started[-1]

    yield start
    for one in started:
        one.kill()
        for pipe in (one.process.stdin, one.process.stdout):
            assert pipe is not None
            pipe.close()


def connect(drivers: Any, transport: Transport, sender: Sender, frame: bytes) -> None:
    """Offer a frame until it is accepted: then the sender is connected to its receiver."""

    def went() -> int:
        transport.poll(0.001)  # completes the opening of streams
        return sender.offer([frame])[0]

    drivers.wait_until(went)


def fill(drivers: Any, transport: Transport, sender: Sender, frame: bytes) -> int:
    """Connect and offer until there is back-pressure; return how many frames were accepted."""
    connect(drivers, transport, sender, frame)
    sent = 1
    while (answer := sender.offer([frame]))[0]:
        sent += 1
        assert sent * len(frame) < 8 << 20
    assert answer == (0, OfferResult.BUSY)
    return sent


def frames_for(longest: int, count: int) -> list[bytes]:
    """Return random frames of various lengths up to ``longest``."""
    dice = random.Random(3)
    lengths = [1, longest, longest - 1, *(dice.randrange(1, longest) for _ in range(count))]
    return [dice.randbytes(length) for length in lengths]


@pytest.mark.parametrize("control", [False, True])
def test_local_streams_carry_frames_in_both_directions(
    drivers: Any, neighbour: StartNeighbour, control: bool
) -> None:
    """Two processes exchange frames without loss, in order and without datagrams."""
    here = drivers.transport()
    other = neighbour(control=control)
    here.open_receiver(BACK, local=True)
    sender = here.open_sender(here.endpoint, THERE, control=control, local=True)
    longest = here.max_control_frame_bytes if control else here.max_frame_bytes
    before = here.counters()

    sent = fill(drivers, here, sender, bytes(longest))  # the neighbour does not read yet
    frames = [bytes(longest)] * sent + frames_for(longest, 200)
    other.ask("echo")
    got: list[bytes] = []

    def round_trip() -> bool:
        nonlocal sent
        sent += sender.offer(frames[sent:])[0]
        got.extend(arrival.frame for arrival in here.poll(0.001))
        return len(got) >= len(frames)

    drivers.wait_until(round_trip)
    assert got == frames
    after = here.counters()
    assert after["fragments_discarded"] == 0
    assert after["driver_bytes_sent"] - before["driver_bytes_sent"] < 10_000  # no datagrams


def test_frames_of_killed_sender_arrive(
    drivers: Any, neighbour: StartNeighbour, exchange: Any
) -> None:
    """Frames of a killed sender arrive, and its receiver can open further streams."""
    here = drivers.transport()
    here.open_receiver(BACK, local=True)
    other = neighbour()
    assert other.ask("say") == "said"
    other.kill()
    got: list[bytes] = []
    drivers.wait_until(lambda: got.extend(a.frame for a in here.poll(0.01)) or len(got) == 20)
    assert got == [b"%d" % i * 1000 for i in range(20)]
    here.open_receiver(BACK + 2, local=True)
    neighbour(streams=(THERE + 2, BACK + 2)).ask("say")
    assert here.poll(30)


def test_killed_receiver_makes_only_its_sender_busy(
    drivers: Any, neighbour: StartNeighbour
) -> None:
    """A sender to a killed receiver gets BUSY; another stream of the same transport works."""
    here = drivers.transport()
    sender = here.open_sender(here.endpoint, THERE, control=False, local=True)
    other = neighbour()
    connect(drivers, here, sender, b"alive")
    other.kill()
    fill(drivers, here, sender, bytes(here.max_frame_bytes))
    assert sender.offer([b"x"]) == (0, OfferResult.BUSY)
    sender.close()
    assert sender.offer([b"x"]) == (0, OfferResult.CLOSED)

    again = neighbour(streams=(THERE + 2, BACK + 2))
    sender = here.open_sender(here.endpoint, THERE + 2, control=False, local=True)
    connect(drivers, here, sender, b"hello")
    assert again.ask("hear") == "hello"


def test_sender_stays_unconnected_after_receiver_closed(drivers: Any, exchange: Any) -> None:
    """After its receiver closed, a sender stays unconnected, and its log is deleted."""
    here, there = drivers.transport(), drivers.transport()
    before = set(logs_of(here))  # logs of the media driver's self-test, which it deletes later
    there.open_receiver(THERE, local=True)
    old = here.open_sender(there.endpoint, THERE, control=True, local=True)
    exchange(here, old, [b"first"], there)
    there.close_receiver(THERE)
    drivers.wait_until(lambda: old.offer([b"lost"])[1] is OfferResult.UNCONNECTED)
    drivers.wait_until(lambda: set(logs_of(here)) <= before)
    there.open_receiver(THERE, local=True)
    new = here.open_sender(there.endpoint, THERE, control=True, local=True)
    assert exchange(here, new, [b"second"], there) == [(THERE, b"second")]
    assert old.offer([b"late"]) == (0, OfferResult.UNCONNECTED)
    assert there.poll(0.01) == []


def test_sender_connects_to_receiver_opened_later(drivers: Any, exchange: Any) -> None:
    """A sender connects once its receiver is opened."""
    here, there = drivers.transport(), drivers.transport()
    sender = here.open_sender(there.endpoint, THERE, control=True, local=True)
    for _ in range(10):
        assert sender.offer([b"early"]) == (0, OfferResult.UNCONNECTED)
        here.poll(0.002)
    there.open_receiver(THERE, local=True)
    assert exchange(here, sender, [b"now"], there) == [(THERE, b"now")]


def test_local_and_udp_streams_are_separate(drivers: Any, exchange: Any) -> None:
    """Local and UDP streams of one number are separate on one media driver."""
    here, there = drivers.transport(), drivers.transport()
    here.open_receiver(THERE, local=True)
    there.open_receiver(THERE)
    by_memory, by_udp = (
        here.open_sender(there.endpoint, THERE, control=True, local=local)
        for local in (True, False)
    )
    assert exchange(here, by_memory, [b"local"], here) == [(THERE, b"local")]
    assert exchange(here, by_udp, [b"udp"], there) == [(THERE, b"udp")]
    assert here.poll(0.01) == there.poll(0.01) == []


def test_stream_cannot_be_both_local_and_udp(drivers: Any) -> None:
    """A stream that is open as local or UDP cannot be opened as the other kind."""
    transport = drivers.transport()
    transport.open_receiver(THERE, local=True)
    with pytest.raises(UsageError, match=f"stream {THERE} .* as a UDP .* open as a local one"):
        transport.open_receiver(THERE)
    transport.close_receiver(THERE)
    transport.open_receiver(THERE)
    with pytest.raises(UsageError, match=f"stream {THERE} .* as a local .* open as a UDP one"):
        transport.open_receiver(THERE, local=True)


def test_a_local_sender_does_not_reach_another_media_driver(drivers: Any) -> None:
    here, there = drivers.transport("a"), drivers.transport("b")
    there.open_receiver(THERE, local=True)
    sender = here.open_sender(there.endpoint, THERE, control=True, local=True)
    for _ in range(50):
        assert sender.offer([b"anybody?"]) == (0, OfferResult.UNCONNECTED)
        here.poll(0.002)


def logs_of(transport: AeronTransport) -> list[Path]:
    """Return the log files of the transport's media driver."""
    return list(transport._handle.aeron_directory.rglob("*.logbuffer"))


def test_local_edge_uses_reserved_log_size_and_frees_it(drivers: Any) -> None:
    """The logs of a local edge have the size that was reserved, and are deleted with it."""
    here, there = drivers.transport(), drivers.transport()
    before = {log.name for log in logs_of(here)}
    senders = []
    for stream, control in ((THERE, True), (THERE + 2, False)):
        for from_, to in ((here, there), (there, here)):
            to.open_receiver(stream, local=True)
            senders.append(from_.open_sender(to.endpoint, stream, control=control, local=True))
            fill(drivers, from_, senders[-1], bytes(1000))  # unread frames do not keep a log
    sizes = here._handle.sizes
    logs = [log for log in logs_of(here) if log.name not in before]
    assert sum(log.stat().st_size for log in logs) == (
        required_log_bytes(1, sizes.data_term, sizes.control_term) - DRIVER_OVERHEAD_BYTES
    )
    for sender in senders:
        sender.close()
    drivers.wait_until(lambda: not any(log.exists() for log in logs))


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "poll": lambda transport, sender: transport.poll(60),
    "offer": lambda transport, sender: sender.offer([b"x"]),
    "open_sender": lambda t, sender: t.open_sender(t.endpoint, 1, control=True, local=True),
    "open_receiver": lambda transport, sender: transport.open_receiver(99, local=True),
    "close_receiver": lambda transport, sender: transport.close_receiver(THERE),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_every_call_of_both_clients_raises_driver_lost(
    drivers: Any, exchange: Any, call: Any
) -> None:
    """Each call of both clients raises DriverLost after their media driver was killed."""
    here, there = drivers.transport(), drivers.transport()
    for transport in (here, there):
        transport.open_receiver(THERE if transport is there else BACK, local=True)
    to = here.open_sender(there.endpoint, THERE, control=False, local=True)
    back = there.open_sender(here.endpoint, BACK, control=False, local=True)
    exchange(here, to, [b"alive"], there)
    exchange(there, back, [b"alive"], here)
    pid = here._handle.pid
    os.kill(pid, signal.SIGKILL)
    for transport, sender in ((here, to), (there, back)):
        with pytest.raises(DriverLost, match=f"pid {pid}"):
            drivers.wait_until(lambda t=transport, s=sender: call(t, s) == "never")


def test_local_stream_works_on_next_driver_after_kill(drivers: Any, exchange: Any) -> None:
    """After a media driver was killed, new transports use the next one for local streams."""
    here, there = drivers.transport(), drivers.transport()
    os.kill(here._handle.pid, signal.SIGKILL)
    for transport in (here, there):
        with pytest.raises(DriverLost):
            transport.poll(60)
        transport.close()
    here, there = drivers.transport(), drivers.transport()
    there.open_receiver(THERE, local=True)
    sender = here.open_sender(there.endpoint, THERE, control=False, local=True)
    assert exchange(here, sender, [b"again"], there) == [(THERE, b"again")]
