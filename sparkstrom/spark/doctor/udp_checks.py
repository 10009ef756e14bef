"""UDP checks: from what every process heard to a matrix, and to findings. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparkstrom.spark.doctor.findings import Finding, Matrix, UdpWay, failure, good, warning
from sparkstrom.transport.aeron.sizes import MTU_NETWORK
from sparkstrom.transport.udp_probe import HeardOf

CHECK = "udp"
SLOW_BYTES_S = 1.25e6  # 10 Mbit/s
FAR_MS = 50.0
NAMED_MAX = 6  # of the ways that share a fault


def matrix_of(names: Sequence[str], heard: Mapping[int, Mapping[int, HeardOf]]) -> Matrix:
    """Ways by name, of processes that heard at all; ``heard``: by receiver, then by sender."""
    matrix: Matrix = {name: {} for name in names}
    for receiver, peers in heard.items():
        for sender, one in peers.items():
            back = heard.get(sender, {}).get(receiver)
            trip_s = back.round_trip_s if back is not None else None
            matrix[names[sender]][names[receiver]] = UdpWay(
                one.pinged,
                one.whole,
                one.pieces,
                None if trip_s is None else round(1000 * trip_s, 3),
                None if one.bytes_s is None else round(one.bytes_s),
            )
    return matrix


def udp_findings(matrix: Matrix, ports: Mapping[str, int]) -> list[Finding]:
    """What of the matrix stands in the way; ``ports``: UDP ports by name."""
    ways = {(a, b): way for a, row in matrix.items() for b, way in row.items()}
    deaf = [way for way, found in ways.items() if not found.heard]
    findings = []
    for receiver in sorted({b for _, b in deaf}):
        from_ = [a for a, b in deaf if b == receiver]
        findings.append(
            failure(
                CHECK,
                receiver,
                f"hears nothing at port {ports[receiver]} from {_some(from_)}",
                f"open UDP to port {ports[receiver]} of {receiver}, and between all hosts in both "
                "directions; fix the ports with unicast_port and port_range, the network with "
                "network_mask; if only the driver is out of reach, controller='executor' will do",
            )
        )
    findings += _of_length(ways)
    findings += _of_speed(ways)
    if not deaf and ways:
        findings.append(good(CHECK, "all", f"all {len(ways)} ways carry datagrams"))
    return findings


def _of_length(ways: Mapping[tuple[str, str], UdpWay]) -> list[Finding]:
    heard = {way: found for way, found in ways.items() if found.heard}
    lost = [way for way, found in heard.items() if not found.pieces]
    cut = [way for way, found in heard.items() if found.pieces and not found.whole]
    findings = []
    remedy = f"raise the path's MTU to 1500, or at least {MTU_NETWORK + 28} (VPNs and overlays cut)"
    if lost:
        found = f"short datagrams arrive, those of {MTU_NETWORK} bytes do not: {_some_ways(lost)}"
        findings.append(failure("path mtu", lost[0][1], found, remedy))
    if cut:
        found = f"datagrams of {MTU_NETWORK} bytes are cut up on their way: {_some_ways(cut)}"
        findings.append(warning("path mtu", cut[0][1], found, remedy))
    return findings


def _of_speed(ways: Mapping[tuple[str, str], UdpWay]) -> list[Finding]:
    slow = {w: f.bytes_s for w, f in ways.items() if f.bytes_s and f.bytes_s < SLOW_BYTES_S}
    far = {w: f.round_trip_ms for w, f in ways.items() if (f.round_trip_ms or 0) > FAR_MS}
    findings = []
    if slow:
        found = f"below {SLOW_BYTES_S / 1e6:.2f} MB/s: {_some_ways(list(slow))}"
        remedy = "training goes on, workers wait for the slowest link: README, Narrow links"
        findings.append(warning("rate", "all", found, remedy))
    if far:
        found = f"round trips above {FAR_MS:.0f} ms: {_some_ways(list(far))}"
        remedy = "keep executors in one zone, or see whether hosts are overloaded"
        findings.append(warning("round trip", "all", found, remedy))
    return findings


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return ", ".join(names[:NAMED_MAX]) + more


def _some_ways(ways: Sequence[tuple[str, str]]) -> str:
    return _some([f"{a} to {b}" for a, b in ways])
