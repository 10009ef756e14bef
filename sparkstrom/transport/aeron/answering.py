"""Does a media driver answer? Asked by Aeron's own datagrams, between a fit's addresses and ports.

A publication is connected once a status message has come back for its set-up datagrams, so one
answer shows that the way there and the way back are open. It goes to the stream that keeps the
other driver's port bound: somebody listens there as long as that driver lives, whatever its clients
do. Nothing is sent on it.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any, Final

from sparkstrom.base.errors import DriverLost
from sparkstrom.base.identity import Endpoint
from sparkstrom.transport.aeron.channels import random_session, trial_uri
from sparkstrom.transport.aeron.checked import Aeron, ffi
from sparkstrom.transport.aeron.driver import DriverHandle
from sparkstrom.transport.aeron.invoked import invoked_client, still_runs
from sparkstrom.transport.aeron.library import load_library

ANCHOR_STREAM: Final = 0  # of every media driver: it keeps the port bound, and nobody sends to it
PARK_S: Final = 0.001
GIVEN_UP: Final = "asking for an answer", 0, "the media driver of this host has ended"
TERM_BYTES: Final = 65_536  # the least that Aeron takes: at the other side each asker costs a log


def is_answered(handle: DriverHandle, there: Endpoint, seconds: float) -> bool:
    """Whether the media driver at ``there`` answers ours within so long; returns when it does.

    Raise DriverLost where our own ends meanwhile, TransportError for what it cannot do.
    """
    aeron = load_library()
    end_s = time.monotonic() + seconds
    with ExitStack() as closing:
        _need_alive(handle)
        client = invoked_client(aeron, handle.aeron_directory, "asking", closing)
        asking = _Asking(aeron, client, trial_uri(there, random_session(), TERM_BYTES))
        while not asking.is_connected():
            _need_alive(handle)
            if not still_runs(aeron, client):
                raise DriverLost(*GIVEN_UP)
            if time.monotonic() > end_s:
                asking.close()
                return False
            time.sleep(PARK_S)
        asking.close()
        still_runs(aeron, client)
    return True


def _need_alive(handle: DriverHandle) -> None:
    if not handle.is_alive():
        raise DriverLost(*GIVEN_UP)


class _Asking:
    """A publication, from the asking to the revoking."""

    def __init__(self, aeron: Aeron, client: Any, uri: str) -> None:
        self._aeron, self._uri = aeron, uri
        adding = ffi.new("aeron_async_add_exclusive_publication_t **")
        add = aeron.lib.aeron_async_add_exclusive_publication
        aeron.checked(add(adding, client, uri.encode(), ANCHOR_STREAM), f"opening {uri}")
        self._adding = adding[0]
        self._publication: Any = None

    def is_connected(self) -> bool:
        """Look once."""
        lib, checked = self._aeron.lib, self._aeron.checked
        if self._publication is None:
            added = ffi.new("aeron_exclusive_publication_t **")
            poll = lib.aeron_async_add_exclusive_publication_poll
            if not checked(poll(added, self._adding), f"opening {self._uri}"):
                return False
            self._publication = added[0]
        return bool(lib.aeron_exclusive_publication_is_connected(self._publication))

    def close(self) -> None:
        """Revoke, so that no log lingers on either side."""
        if self._publication is not None:
            revoke = self._aeron.lib.aeron_exclusive_publication_revoke
            self._aeron.checked(revoke(self._publication, ffi.NULL, ffi.NULL), "closing")
