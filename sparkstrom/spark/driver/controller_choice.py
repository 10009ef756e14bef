"""Controller choice: where the master of a fit runs, as the option ``controller`` says it."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import shown
from sparkstrom.transport.addresses import Listed

AUTO, DRIVER, EXECUTOR = WORDS = ("auto", "driver", "executor")
PORT_MAX = 65535


@dataclass(frozen=True, slots=True)
class ControllerChoice:
    """One of the words, or a host that has executors."""

    word: str  # "" where a host is named
    host: str = ""
    port: int | None = None  # UDP

    @property
    def apart(self) -> bool:
        """Is it in a task, whatever is found out? That task has one of the slots."""
        return self.word not in (AUTO, DRIVER)

    def suits(self, names: Iterable[str], listed: Sequence[Listed]) -> bool:
        """Is the machine with these names and addresses the one that was meant?"""
        if not self.host or self.host in names:
            return True
        return self.address_among(listed) is not None or bool(_resolved(self.host, listed))

    def address_among(self, listed: Sequence[Listed], mask: str | None = None) -> str | None:
        """The address that was named, where it is one of these; one outside of the mask is none.

        It names the machine then, as Spark calls it, and the mask says which network.
        """
        inside = (each.address for each in listed if mask is None or _is_in(mask, each.address))
        return next((each for each in inside if _same(each, self.host)), None)

    def resolved_among(self, listed: Sequence[Listed]) -> str | None:
        """The first of these that the name is one of; nobody else finds 127.0.0.1."""
        found = _resolved(self.host, listed) if self.host else []
        return next((each for each in found if not ipaddress.ip_address(each).is_loopback), None)

    def ports(self, otherwise: range | None) -> range | None:
        """UDP ports to try: the one that was named, or these."""
        return otherwise if self.port is None else range(self.port, self.port + 1)


def parse_controller(text: object) -> ControllerChoice:
    """Raise UsageError for what is none."""
    reason = (
        'must be "driver", "executor", "auto", or HOST or HOST:PORT of a machine with executors, '
        'IPv6 as "[fd00::1]:40123"'
    )
    if not isinstance(text, str) or not text.strip():
        raise UsageError(f"controller={shown(text)}: {reason}")
    word = text.strip()
    if word in WORDS:
        return ControllerChoice(word)
    host, port = word, ""
    if word.startswith("["):
        host, bracket, rest = word[1:].partition("]")
        if not bracket or rest[:1] not in ("", ":"):
            raise UsageError(f"controller={shown(text)}: {reason}")
        port = rest[1:]
        if rest == ":":
            port = ":"
    elif word.count(":") == 1:
        host, _, port = word.partition(":")
        port = port or ":"
    if not host or any(letter.isspace() for letter in host):
        raise UsageError(f"controller={shown(text)}: {reason}")
    if port and not (port.isdecimal() and 1 <= int(port) <= PORT_MAX):
        raise UsageError(f"controller={shown(text)}: a UDP port is between 1 and {PORT_MAX}")
    return ControllerChoice("", host, int(port) if port else None)


def who_is_master(text: object) -> str:
    """For people: what runs the master of a fit with this option, once it is found out."""
    return "controller" if parse_controller(text).apart else "driver"


def _same(address: str, text: str) -> bool:
    try:
        return ipaddress.ip_address(address) == ipaddress.ip_address(text)
    except ValueError:
        return False


def _is_in(mask: str, address: str) -> bool:
    return ipaddress.ip_address(address) in ipaddress.ip_network(mask, strict=False)


def _resolved(host: str, listed: Sequence[Listed]) -> list[str]:
    """Which of these addresses it is a name of."""
    try:
        found = {str(each[4][0]) for each in socket.getaddrinfo(host, None)}
    except OSError:
        return []
    return [has.address for has in listed if any(_same(has.address, each) for each in found)]
