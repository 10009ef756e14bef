"""The UDP probe on loopback: present and absent peers, forged datagrams, throughput."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from sparkstrom.base.errors import SetupError
from sparkstrom.base.identity import Endpoint
from sparkstrom.transport import udp_probe
from sparkstrom.transport.aeron.driver_process import find_free_port
from sparkstrom.transport.udp_probe import (
    PeerResult,
    ProbeGroup,
    UdpProbe,
    _IncomingTrain,
    bind_socket,
)

HOST = "127.0.0.1"
TOKEN = b"sixteen bytes..."


def make_group(size: int, seconds: float, host: str = HOST) -> ProbeGroup:
    """Return a group of this many free endpoints, probed for ``seconds``."""
    ports = [find_free_port(host, 0) for _ in range(size)]
    return ProbeGroup(tuple(Endpoint(host, port) for port in ports), TOKEN, seconds)


def run_probes(
    group: ProbeGroup, present: list[int], length: int = 1408
) -> list[dict[int, PeerResult]]:
    """Run the probes of the members ``present`` at the same time; return their results."""
    with ThreadPoolExecutor(len(present)) as pool:
        probes = [UdpProbe(group, own, lambda endpoint: length).__enter__() for own in present]
        heard = [future.result() for future in [pool.submit(probe.run) for probe in probes]]
        for probe in probes:
            probe.__exit__()
    return heard


@pytest.mark.parametrize("host", [HOST, "::1"])
def test_group_members_measure_reachability_and_throughput(host: str) -> None:
    """All members of a group measure reachability, round-trip times and throughput."""
    if host == "::1" and not _has(host):
        pytest.skip("no IPv6 on this machine")
    heard = run_probes(make_group(3, 60, host), [0, 1, 2])
    assert [sorted(peers) for peers in heard] == [[1, 2], [0, 2], [0, 1]]
    for one in (one for peers in heard for one in peers.values()):
        assert one.receives_pings
        assert one.receives_unfragmented
        assert one.receives_fragmentable
        assert one.has_finished
        assert one.round_trip_s is not None
        assert 0 < one.round_trip_s < 60
        assert one.bytes_s is not None
        assert one.bytes_s > 0


def _has(host: str) -> bool:
    """Return whether this machine can bind a UDP port of ``host``."""
    try:
        return find_free_port(host, 0) > 0
    except (SetupError, OSError):
        return False


def test_absent_member_has_empty_result_after_deadline() -> None:
    """A member that does not run has an empty result after the deadline."""
    first, second = run_probes(make_group(3, 1.0), [0, 1])
    assert first[1].receives_pings
    assert second[0].receives_pings
    assert first[2] == second[2] == PeerResult()


def test_stopped_probe_returns_empty_result() -> None:
    """``run`` returns, with an empty result, once ``stopped`` returns True."""
    group = make_group(2, 600)
    looks = iter([False, False, True])
    with UdpProbe(group, 0, lambda endpoint: 1408) as probe:
        assert probe.run(stopped=lambda: next(looks)) == {1: PeerResult()}


def test_invalid_or_foreign_datagrams_do_not_change_result() -> None:
    """Invalid datagrams, and those with another token, do not change the result."""
    group = make_group(2, 0.3)
    theirs = ProbeGroup(group.endpoints, b"another token...", 0.3)
    ping = udp_probe.DatagramKind.PING_UNFRAGMENTED
    header = udp_probe.HEADER.pack(TOKEN, ping, 1, 1408, 1)
    too_short = make_authentic_header(group, ping, 1, length=1408)
    with (
        UdpProbe(group, 0, lambda endpoint: 1408) as probe,
        UdpProbe(theirs, 1, lambda endpoint: 1408) as stranger,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as rubbish,
        ThreadPoolExecutor(1) as pool,
    ):
        looking = pool.submit(probe.run)
        for noise in (b"", b"x", header, too_short):
            rubbish.sendto(noise, tuple(group.endpoints[0]))
        stranger.run()
        assert looking.result() == {1: PeerResult()}


def make_authentic_header(
    group: ProbeGroup, kind: udp_probe.DatagramKind, stamp_ns: int, length: int = 0
) -> bytes:
    """Return an authentic header from peer 1 to peer 0, which gives ``length`` for the datagram."""
    proof = UdpProbe(group, 1, lambda endpoint: 1408)._proof(kind, 1, length, stamp_ns, 0)
    return udp_probe.HEADER.pack(proof, kind, 1, length, stamp_ns)


def reply_bytes(probe: UdpProbe, listening: socket.socket, datagrams: list[bytes]) -> int:
    """Let the probe handle these datagrams; return the bytes that it sends in reply."""
    for datagram in datagrams:
        probe._on_datagram(datagram)
    end_s, count = time.monotonic() + 2 * udp_probe.TRAIN_S, 0
    while probe._outgoing and time.monotonic() < end_s:
        probe._send_trains(time.monotonic())
        count += drain_socket(listening)
    return count + drain_socket(listening)


def drain_socket(listening: socket.socket) -> int:
    """Read all waiting datagrams; return their bytes."""
    count = 0
    while True:
        try:
            count += len(listening.recv(65_536))
        except BlockingIOError:
            return count


def test_forged_datagrams_get_no_reply_and_no_token() -> None:
    """Forged datagrams get no reply, and no datagram contains the token."""
    group = make_group(2, 0.3)
    kinds = udp_probe.DatagramKind
    with (
        UdpProbe(group, 0, lambda endpoint: 1408) as probe,
        bind_socket(group.endpoints[1]) as peer,
    ):
        forged = [udp_probe.HEADER.pack(TOKEN, kind, 1, 0, 1) for kind in kinds]
        assert reply_bytes(probe, peer, forged * 5) == 0
        probe._ping(1)
        assert TOKEN not in peer.recv(65_536)


def test_train_is_sent_once_and_only_for_recent_ping() -> None:
    """A train is sent once, and only for a request with the stamp of a recent ping."""
    group = make_group(2, 0.3)
    go = udp_probe.DatagramKind.GO
    with (
        UdpProbe(group, 0, lambda endpoint: 1408) as probe,
        bind_socket(group.endpoints[1]) as peer,
    ):
        assert reply_bytes(probe, peer, [make_authentic_header(group, go, 1)] * 5) == 0
        probe._ping(1)
        drain_socket(peer)
        fresh = make_authentic_header(group, go, probe._ping_states[1].sent_ns[-1])
        first = reply_bytes(probe, peer, [fresh] * 5)
        assert 1408 <= first <= udp_probe.TRAIN_BYTES + 1408
        assert reply_bytes(probe, peer, [fresh] * 5) == 0


def test_pings_before_probe_start_are_ignored() -> None:
    """Before, late replies made round trips up to 0.1 s longer for a peer that started earlier."""
    group = make_group(2, 0.3)
    ping = make_authentic_header(group, udp_probe.DatagramKind.PING, 1)
    looks = iter([False, True])
    with (
        UdpProbe(group, 0, lambda endpoint: 1408) as probe,
        bind_socket(group.endpoints[1]) as peer,
    ):
        for _ in range(3 * udp_probe.READS_MAX):
            peer.sendto(ping, tuple(group.endpoints[0]))
        assert probe.run(stopped=lambda: next(looks)) == {1: PeerResult()}


def test_pong_with_unknown_stamp_is_ignored() -> None:
    """A pong with a stamp that this probe never sent is ignored."""
    group = make_group(2, 0.3)
    pong = udp_probe.DatagramKind.PONG
    with UdpProbe(group, 0, lambda endpoint: 1408) as probe:
        probe._on_datagram(make_authentic_header(group, pong, 1))
        assert probe.results[1] == PeerResult()


def test_port_that_stays_bound_is_named_in_setup_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that stays taken is a SetupError with the port's number."""
    monkeypatch.setattr(udp_probe, "BIND_TIMEOUT_S", 0.0)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind((HOST, 0))
        port = taken.getsockname()[1]
        with pytest.raises(SetupError, match=f"{port}.*choose another port_range"):
            bind_socket(Endpoint(HOST, port))


@pytest.mark.parametrize(
    ("datagrams", "interval_s", "is_measured"),
    [(32, 6e-5, False), (1, 0.0, False), (200, 6e-5, True), (10, 0.02, True)],
)
def test_too_short_train_gives_no_rate(
    datagrams: int, interval_s: float, is_measured: bool
) -> None:
    """Trains too short to measure give no rate: buffered bursts once made 160 of 50 Mbit/s."""
    train = _IncomingTrain(peer=1, requested_s=0.0)
    for number in range(datagrams):
        train.record(1408, 1.0 + number * interval_s)
    rate = train.bytes_s()
    assert (rate is not None) == is_measured
    assert rate is None or rate == pytest.approx(1408 / interval_s)
