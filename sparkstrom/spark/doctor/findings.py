"""Findings: what was looked at, where, what was found, and what to do about it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


class Level(enum.StrEnum):
    """What a finding means for a fit."""

    OK = "ok"
    WARNING = "warning"  # it works, slower or less safely than it could
    FAILURE = "failure"  # training would fail


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was checked in one place."""

    check: str
    level: Level
    where: str  # "driver", or an executor's name
    found: str
    remedy: str = ""  # of what is not ok


@dataclass(frozen=True, slots=True)
class UdpWay:
    """From one process to another, by what the receiver heard; None: not known."""

    heard: bool
    whole: bool  # datagrams of Aeron's length arrive in one piece
    pieces: bool  # or where routers may cut them up
    round_trip_ms: float | None = None  # there and back, measured by who sent
    bytes_s: float | None = None


Matrix = dict[str, dict[str, UdpWay]]  # by sender, then by receiver


@dataclass(slots=True)
class Report:
    """All that a doctor's run has found."""

    findings: list[Finding] = field(default_factory=list)
    matrix: Matrix = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether training would work, as far as this tells."""
        return all(finding.level is not Level.FAILURE for finding in self.findings)

    def add(self, findings: Sequence[Finding]) -> bool:
        """Whether none of these is a failure."""
        self.findings += findings
        return all(finding.level is not Level.FAILURE for finding in findings)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        matrix = {
            sender: {receiver: asdict(way) for receiver, way in row.items()}
            for sender, row in self.matrix.items()
        }
        return {"ok": self.ok, "findings": [asdict(f) for f in self.findings], "matrix": matrix}


def good(check: str, where: str, found: str) -> Finding:
    """One that needs no remedy."""
    return Finding(check, Level.OK, where, found)


def warning(check: str, where: str, found: str, remedy: str) -> Finding:
    """One with which training works, worse than it could."""
    return Finding(check, Level.WARNING, where, found, remedy)


def failure(check: str, where: str, found: str, remedy: str) -> Finding:
    """One with which training fails."""
    return Finding(check, Level.FAILURE, where, found, remedy)
