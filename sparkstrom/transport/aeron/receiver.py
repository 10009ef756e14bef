"""One subscription on its way: the media driver is asked, and answers when it gets to it.

A driver that is starved of processor time may take seconds. Nobody waits for it: whoever asked
has leases to renew meanwhile. After its own timeout Aeron's client waits no longer; the driver may
still answer then, to nobody, so the whole client goes with what it asked for: DriverLost.
"""

from __future__ import annotations

from typing import Any

from sparkstrom.base.errors import DriverLost, SetupError
from sparkstrom.transport.aeron.checked import Aeron, ffi


class OpeningReceiver:
    """Made by ``AeronTransport.open_receiver``; ``subscription`` is there once it has come up."""

    def __init__(self, aeron: Aeron, client: Any, uri: str, stream: int) -> None:
        """Ask. Raise SetupError or DriverLost, as ``is_opening`` does."""
        self._aeron, self._uri, self._stream = aeron, uri, stream
        self.subscription: Any = None
        self._failure: DriverLost | SetupError | None = None
        adding = ffi.new("aeron_async_add_subscription_t **")
        aeron.clear_error()
        self._check(
            aeron.lib.aeron_async_add_subscription(
                adding, client, uri.encode(), stream, *[ffi.NULL] * 4
            )
        )
        self._adding = adding[0]

    def is_opening(self) -> bool:
        """Look once; False when it is up.

        Raise SetupError where the media driver refused, DriverLost where it did not answer.
        """
        if self._failure is not None:
            raise self._failure  # Aeron has let go of what was asked
        added = ffi.new("aeron_subscription_t **")
        self._aeron.clear_error()
        result = self._aeron.lib.aeron_async_add_subscription_poll(added, self._adding)
        self._check(result)
        self.subscription = added[0] if result else None
        return bool(result == 0)

    def _check(self, result: int) -> None:
        if result >= 0:
            return
        name = f"stream {self._stream} of {self._uri}"
        failure = self._aeron.failure(f"opening {name}")
        if isinstance(failure, DriverLost):
            self._failure = failure
        else:
            self._failure = SetupError(
                f"the media driver refused {name}: Aeron error {failure.code}: {failure.text}"
            )
        raise self._failure
