"""Opening publications and subscriptions when the media driver fails or refuses."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("sparkstrom.transport.aeron._aeron")

from sparkstrom.base.errors import DriverLost, SetupError
from sparkstrom.transport.aeron.client import AeronSender, PendingSubscription
from sparkstrom.transport.aeron.library import (
    DRIVER_TIMEOUT_ERROR,
    STORAGE_SPACE_ERROR,
    AeronLibrary,
    ffi,
)
from sparkstrom.transport.base import OfferResult


class FailingClientFunctions:
    """Aeron's client functions; the first poll of an opening fails, and a second is an error."""

    def __init__(self, code: int) -> None:
        self._code, self._polls = code, 0
        self._words = ffi.new("char[]", b"no luck")

    def __getattr__(self, name: str) -> Any:
        return lambda *given: 0

    def aeron_errcode(self) -> int:
        return self._code

    def aeron_errmsg(self) -> Any:
        return self._words

    def _poll(self, *given: Any) -> int:
        self._polls += 1
        assert self._polls == 1, "polled after Aeron let go"
        return -1

    aeron_async_add_subscription_poll = aeron_async_add_exclusive_publication_poll = _poll


def make_failing_library(code: int) -> AeronLibrary:
    """Return an Aeron library whose functions fail with this code."""
    aeron = object.__new__(AeronLibrary)
    aeron.lib = FailingClientFunctions(code)
    aeron.function_address = lambda function: 0  # type: ignore[method-assign]
    return aeron


def make_failing_sender(code: int) -> AeronSender:
    """Return a sender whose opening fails with this code."""

    def nothing(*given: Any) -> None:
        pass

    return AeronSender(
        make_failing_library(code), None, "aeron:ipc", 1, 9, nothing, nothing, reconnects=True
    )


def test_driver_timeout_while_opening_raises_driver_lost() -> None:
    """A timeout of the media driver is DriverLost at each call."""
    for asked in (
        PendingSubscription(make_failing_library(DRIVER_TIMEOUT_ERROR), None, "u", 3),
        make_failing_sender(DRIVER_TIMEOUT_ERROR),
    ):
        for _ in range(2):
            with pytest.raises(DriverLost, match=r"opening stream .*no luck"):
                asked.is_opening()


def test_refused_subscription_raises_setup_error() -> None:
    """A refused subscription is a SetupError at each call."""
    asked = PendingSubscription(make_failing_library(-3), None, "u", 3)
    for _ in range(2):
        with pytest.raises(SetupError, match="refused stream 3 of u: Aeron error -3: no luck"):
            asked.is_opening()


def test_offer_of_refused_sender_returns_closed() -> None:
    """``offer`` of a refused sender returns CLOSED; a full disk is a SetupError."""
    refused, no_room = make_failing_sender(-3), make_failing_sender(STORAGE_SPACE_ERROR)
    assert not refused.is_opening()
    assert refused.offer([b"x"]) == (0, OfferResult.CLOSED)
    assert not no_room.is_opening()
    with pytest.raises(SetupError, match=r"no room for the log .*no luck"):
        no_room.offer([b"x"])
