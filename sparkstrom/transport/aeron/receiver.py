"""One subscription on its way: the media driver is asked, and answers when it gets to it.

A driver that is starved of processor time may take seconds. Nobody waits for it: whoever asked
has leases to renew meanwhile. A driver that never answers is given up by Aeron's own client.
"""

from __future__ import annotations

from typing import Any

from sparkstrom.base.errors import SetupError
from sparkstrom.transport.aeron.checked import Aeron, ffi


class OpeningReceiver:
    """Made by ``AeronTransport.open_receiver``; ``subscription`` is there once it has come up."""

    def __init__(self, aeron: Aeron, client: Any, uri: str, stream: int) -> None:
        """Ask. Raise SetupError where even that is refused."""
        self._aeron, self._uri, self._stream = aeron, uri, stream
        self.subscription: Any = None
        self._refused: SetupError | None = None
        adding = ffi.new("aeron_async_add_subscription_t **")
        aeron.clear_error()
        self._check(
            aeron.lib.aeron_async_add_subscription(
                adding, client, uri.encode(), stream, *[ffi.NULL] * 4
            )
        )
        self._adding = adding[0]

    def is_opening(self) -> bool:
        """Look once; False when it is up. Raise SetupError where the media driver refused."""
        if self._refused is not None:
            raise self._refused  # Aeron has let go of what was asked
        added = ffi.new("aeron_subscription_t **")
        self._aeron.clear_error()
        result = self._aeron.lib.aeron_async_add_subscription_poll(added, self._adding)
        self._check(result)
        self.subscription = added[0] if result else None
        return bool(result == 0)

    def _check(self, result: int) -> None:
        if result >= 0:
            return
        code, text = self._aeron.last_error()
        self._refused = SetupError(
            f"the media driver refused stream {self._stream} of {self._uri}: "
            f"Aeron error {code}: {text}"
        )
        raise self._refused
