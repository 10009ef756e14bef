"""A message to ourselves: does this library lay out memory as we read it, and hear itself?

Every media driver does this once, before anybody may join it. What is compared: the session in
the publication's constants, in the header that Aeron spells out, and in the 32 bytes before the
payload, from which the kernels read flags and session.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from typing import Any

from sparkstrom.base.errors import SetupError
from sparkstrom.transport.aeron.checked import Aeron, ffi

DEADLINE_S = 5.0
PARK_S = 0.0005
MESSAGE = b"sparkstrom"
TERM_BYTES = 65_536

# i32 frame_length | u8 version | u8 flags | u16 type | i32 term_offset | i32 session | i32 stream
# | i32 term_id | i64 reserved                                                    (little endian)
FRAME_HEADER = struct.Struct("<iBBHiiiiq")
WHOLE = 0xC0


class Heard:
    """What the subscription was handed."""

    def __init__(self, aeron: Aeron) -> None:
        self._aeron = aeron
        self.message = b""
        self.before_payload = self.spelt_out = b""
        self.handler = ffi.callback("aeron_fragment_handler_t", self._take)

    def _take(self, clientd: Any, payload: Any, length: int, header: Any) -> None:
        self.message = bytes(ffi.buffer(payload, length))
        size = FRAME_HEADER.size
        self.before_payload = bytes(ffi.buffer(payload - size, size))
        values = ffi.new("char[64]")
        self._aeron.lib.aeron_header_values(header, values)
        self.spelt_out = bytes(ffi.buffer(values, size))


def loopback_self_test(
    aeron: Aeron,
    client: Any,
    subscription: Any,
    uri: str,
    stream: int,
    session: int,
    keep_alive: Callable[[], bool],
) -> None:
    """Send one message to ``subscription`` and compare what comes; raise SetupError if it differs.

    ``uri`` leads to the subscription and carries ``session``; ``keep_alive`` does the client's
    duties and says whether it still runs.
    """
    deadline = _Deadline(uri, keep_alive)
    publication = _publish_to(aeron, client, uri, stream, deadline)
    lib, heard = aeron.lib, Heard(aeron)
    constants = ffi.new("aeron_publication_constants_t *")
    aeron.checked(lib.aeron_exclusive_publication_constants(publication, constants), "asking")
    while lib.aeron_exclusive_publication_offer(publication, MESSAGE, len(MESSAGE), *_NONE) < 0:
        deadline.wait()
    while not lib.aeron_subscription_poll(subscription, heard.handler, ffi.NULL, 1):
        deadline.wait()
    aeron.checked(lib.aeron_exclusive_publication_revoke(publication, *_NONE), "closing")
    _compare(aeron, heard, constants, stream, session)


_NONE = (ffi.NULL, ffi.NULL)


class _Deadline:
    def __init__(self, uri: str, keep_alive: Callable[[], bool]) -> None:
        self._uri, self._keep_alive = uri, keep_alive
        self._end_s = time.monotonic() + DEADLINE_S

    def wait(self) -> None:
        if not self._keep_alive() or time.monotonic() > self._end_s:
            raise SetupError(
                f"the media driver does not hear itself at {self._uri} within {DEADLINE_S:g} s: "
                "is UDP to the host's own address filtered, or the machine overloaded?"
            )
        time.sleep(PARK_S)


def _publish_to(aeron: Aeron, client: Any, uri: str, stream: int, deadline: _Deadline) -> Any:
    lib = aeron.lib
    adding = ffi.new("aeron_async_add_exclusive_publication_t **")
    added = ffi.new("aeron_exclusive_publication_t **")
    add, poll = (
        lib.aeron_async_add_exclusive_publication,
        lib.aeron_async_add_exclusive_publication_poll,
    )
    aeron.checked(add(adding, client, uri.encode(), stream), "asking for the test's publication")
    while not aeron.checked(poll(added, adding[0]), "opening the test's publication"):
        deadline.wait()
    return added[0]


def _compare(aeron: Aeron, heard: Heard, constants: Any, stream: int, session: int) -> None:
    length, _, flags, kind, _, got_session, got_stream, *_ = FRAME_HEADER.unpack(
        heard.before_payload
    )
    agreed = (
        heard.message == MESSAGE
        and heard.before_payload == heard.spelt_out
        and (length, flags, kind) == (FRAME_HEADER.size + len(MESSAGE), WHOLE, 1)
        and (got_session, got_stream) == (session, stream)
        and (constants.session_id, constants.stream_id) == (session, stream)
        and constants.term_buffer_length == TERM_BYTES
    )
    if not agreed:
        raise SetupError(
            f"{aeron.path} ({aeron.version}) lays out frames or structs otherwise than sparkstrom "
            "reads them: use the pinned library (`sparkstrom fetch-aeron`)"
        )
