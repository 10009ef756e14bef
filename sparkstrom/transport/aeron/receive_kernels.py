"""Receive frames through Aeron's C functions in code compiled by Numba, without the GIL.

Aeron splits long frames into fragments. It passes each one to ``on_fragment``, a C callback
compiled by Numba, which assembles frames and copies complete ones into the caller's buffer. If the
buffer is full, the callback returns ABORT, and Aeron delivers the same fragment again at the next
poll. No Python runs per fragment or frame. C functions are passed as integer addresses at run time,
so that the compiled code can be cached on disk. The functions with an argument ``typing`` (Numba's
typing context) are intrinsics: compiled code calls them without it, and passes the other arguments
as int64.

The caller owns all memory. ``inbox`` i64[INBOX_FIELDS] describes it to ``on_fragment``:

    INBOX_FRAMES        address of u8[frames capacity]       whole frames, one after another
    INBOX_CAPACITY      its length                            (bytes)
    INBOX_USED          in/out: bytes used in it
    INBOX_RECORDS       address of i64[records max, 2]        (stream, bytes) of each frame
    INBOX_RECORDS_MAX   its length                            (frames)
    INBOX_COUNT         in/out: frames in it
    INBOX_STREAM        stream being polled
    INBOX_SLOTS         address of i64[GATHER_SLOTS, 3] of that stream: (session, bytes gathered,
                        last use)
    INBOX_GATHERED      address of u8[GATHER_SLOTS, frame max] of that stream
    INBOX_FRAME_MAX     longest frame that is accepted        (bytes)
    INBOX_FULL          out: 1 when a frame found no room
    INBOX_FRAGMENTS     in/out: fragments received; also the clock of the slots' last use
    INBOX_DISCARDED     in/out: frames discarded (evicted, too long) and stray fragments
    INBOX_WAKE          in: 1 when the caller must stop waiting; set from any thread
    INBOX_BELL          file descriptor of the caller's doorbell, which is rung with each wake and
                        by local senders
    INBOX_PARK_US       first wait for a ring, if nothing has come       (microseconds)
"""

from __future__ import annotations

from typing import Any

from sparkstrom.encoding.cpu import kernel_loader as compiled
from sparkstrom.encoding.cpu.kernel_loader import callback, helper, kernel, native

if compiled.compiler is not None:  # without a compiler none of this runs, so Numba is not imported
    from llvmlite import ir
    from numba import carray, types
    from numba.core import cgutils

INBOX_FRAMES = 0
INBOX_CAPACITY = 1
INBOX_USED = 2
INBOX_RECORDS = 3
INBOX_RECORDS_MAX = 4
INBOX_COUNT = 5
INBOX_STREAM = 6
INBOX_SLOTS = 7
INBOX_GATHERED = 8
INBOX_FRAME_MAX = 9
INBOX_FULL = 10
INBOX_FRAGMENTS = 11
INBOX_DISCARDED = 12
INBOX_WAKE = 13
INBOX_BELL = 14
INBOX_PARK_US = 15
INBOX_FIELDS = 16

# Fragmented frames that are gathered at once per stream. With more senders in the middle of a
# frame, the one that has been silent longest is evicted.
GATHER_SLOTS = 8
SLOT_FIELDS = 3
FREE_SLOT = -1  # not a session id, because those are read as u32

# One row per subscription, i64[RECEIVER_FIELDS]: (Aeron's pointer, stream, slots, gathered).
RECEIVER_FIELDS = 4

ABORT, CONTINUE = 1, 4  # aeron_controlled_fragment_handler_action_t
BEGIN_FLAG, END_FLAG, UNFRAGMENTED_FLAGS = 0x80, 0x40, 0xC0
# The frame header directly precedes its payload.
FRAME_HEADER_BYTES, FLAGS_OFFSET, SESSION_OFFSET = 32, 5, 12

FRAGMENTS_PER_TURN = 64  # polled from one subscription before the next one
BUSY_TURNS_MAX = 256  # bounds a poll during a flood of incomplete frames
PARK_US_MIN, PARK_US_MAX = 50, 1000  # waits double
PARK_US_RUNG = 5000  # while only local senders send, which ring
POLLIN = 1  # of ``struct pollfd``
# i64[PARKING_FIELDS]: a ``struct pollfd``, a ``struct timespec``, and room for rings that are read.
PARKING_TIMESPEC, PARKING_RINGS, PARKING_FIELDS = 1, 3, 67


def _c_call_intrinsic(result_bits: int, arguments: int) -> Any:
    """Return (result type, code generator) of an intrinsic that calls a C function by address.

    The C function returns an integer of ``result_bits`` bits and takes ``arguments`` arguments of
    64 bits.
    """
    result = {32: types.int32, 64: types.int64}[result_bits]

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        """Generate the LLVM code of the call."""
        kind = ir.FunctionType(ir.IntType(result_bits), [ir.IntType(64)] * arguments)
        return builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])

    return result, build


@native
def call_poll(typing: Any, address: Any, sub: Any, handler: Any, inbox: Any, limit: Any) -> Any:
    """Call ``aeron_subscription_controlled_poll(sub, handler, inbox, limit)`` at ``address``."""
    result, build = _c_call_intrinsic(32, 4)
    return result(*[types.int64] * 5), build


@native
def call_clock(typing: Any, address: Any) -> Any:
    """Call ``int64_t aeron_nano_clock(void)`` at ``address``."""
    result, build = _c_call_intrinsic(64, 0)
    return result(types.int64), build


@native
def call_ppoll(
    typing: Any, address: Any, descriptors: Any, count: Any, timeout: Any, signals: Any
) -> Any:
    """Call ``int ppoll(struct pollfd *, nfds_t, struct timespec *, sigset_t *)`` at ``address``."""
    result, build = _c_call_intrinsic(32, 4)
    return result(*[types.int64] * 5), build


@native
def call_read(typing: Any, address: Any, descriptor: Any, buffer: Any, count: Any) -> Any:
    """Call ``ssize_t read(int, void *, size_t)`` at ``address``."""
    result, build = _c_call_intrinsic(64, 3)
    return result(*[types.int64] * 4), build


@native
def pointer_to(typing: Any, address: Any) -> Any:
    """Convert an integer address to a pointer, for ``carray``."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        """Generate the LLVM code of the conversion."""
        return builder.inttoptr(values[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), build


@native
def copy_bytes(typing: Any, target: Any, source: Any, count: Any) -> Any:
    """Copy ``count`` bytes from address ``source`` to ``target`` by ``memcpy``; return nothing.

    The two ranges of memory must not overlap.
    """

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        """Generate the LLVM code of ``memcpy``."""
        target, source = (builder.inttoptr(v, cgutils.voidptr_t) for v in values[:2])
        cgutils.raw_memcpy(builder, target, source, values[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), build


@helper
def find_slot(slots: Any, session: int) -> int:
    """Return the index of the slot that assembles a frame of the sender ``session``, or -1."""
    for i in range(GATHER_SLOTS):
        if slots[i, 0] == session:
            return i
    return -1


@helper
def choose_slot(slots: Any, session: int) -> int:
    """Return the index of the slot in which to assemble a new frame of the sender ``session``.

    This is the sender's own slot, otherwise a free one, otherwise the one unused for longest.
    """
    chosen = 0
    for i in range(GATHER_SLOTS):
        if slots[i, 0] == session:
            return i
        if slots[i, 0] == FREE_SLOT or (
            slots[chosen, 0] != FREE_SLOT and slots[i, 2] < slots[chosen, 2]
        ):
            chosen = i
    return chosen


@helper
def has_room(inbox: Any, length: int) -> Any:
    """Return whether a frame of ``length`` bytes fits; set INBOX_FULL if not."""
    fits = (
        inbox[INBOX_COUNT] < inbox[INBOX_RECORDS_MAX]
        and inbox[INBOX_USED] + length <= inbox[INBOX_CAPACITY]
    )
    if not fits:
        inbox[INBOX_FULL] = 1
    return fits


@helper
def append_frame(inbox: Any, head: int, head_bytes: int, tail: int, tail_bytes: int) -> None:
    """Append a frame to the caller's buffer, and record its stream and length.

    The frame is given in two pieces at the addresses ``head`` and ``tail``, with their lengths.
    """
    target = inbox[INBOX_FRAMES] + inbox[INBOX_USED]
    copy_bytes(target, head, head_bytes)
    copy_bytes(target + head_bytes, tail, tail_bytes)
    records = carray(pointer_to(inbox[INBOX_RECORDS]), (inbox[INBOX_RECORDS_MAX], 2), types.int64)
    records[inbox[INBOX_COUNT], 0] = inbox[INBOX_STREAM]
    records[inbox[INBOX_COUNT], 1] = head_bytes + tail_bytes
    inbox[INBOX_USED] += head_bytes + tail_bytes
    inbox[INBOX_COUNT] += 1


@helper
def gather_fragment(inbox: Any, flags: int, session: int, payload: int, length: int) -> int:
    """Add a fragment to the frame of its sender (session); append the frame once it is complete.

    The fragment has ``length`` bytes at the address ``payload``; ``flags`` are those of its header.
    Discard a fragment whose frame's beginning is missing, or a frame that gets too long. Return
    CONTINUE, or ABORT if the caller's buffer has no room.
    """
    slots = carray(pointer_to(inbox[INBOX_SLOTS]), (GATHER_SLOTS, SLOT_FIELDS), types.int64)
    if flags & BEGIN_FLAG:
        slot = choose_slot(slots, session)
        inbox[INBOX_DISCARDED] += slots[slot, 0] != FREE_SLOT
        slots[slot, 0] = session
        slots[slot, 1] = 0
    else:
        slot = find_slot(slots, session)
    if slot < 0 or slots[slot, 1] + length > inbox[INBOX_FRAME_MAX]:
        if slot >= 0:
            slots[slot, 0] = FREE_SLOT
        inbox[INBOX_DISCARDED] += 1
        return CONTINUE
    gathered = inbox[INBOX_GATHERED] + slot * inbox[INBOX_FRAME_MAX]
    if flags & END_FLAG:
        if not has_room(inbox, slots[slot, 1] + length):
            return ABORT
        append_frame(inbox, gathered, slots[slot, 1], payload, length)
        slots[slot, 0] = FREE_SLOT
        return CONTINUE
    copy_bytes(gathered + slots[slot, 1], payload, length)
    slots[slot, 1] += length
    slots[slot, 2] = inbox[INBOX_FRAGMENTS]
    return CONTINUE


@helper
def park(functions: Any, bell: int, parking: Any, parking_address: int, park_us: int) -> Any:
    """Wait up to ``park_us`` us for bytes in the doorbell; read them; return whether any came."""
    parking[0] = bell | POLLIN << 32
    parking[PARKING_TIMESPEC] = park_us // 1_000_000
    parking[PARKING_TIMESPEC + 1] = park_us % 1_000_000 * 1000
    timeout = parking_address + 8 * PARKING_TIMESPEC
    if call_ppoll(functions[3], parking_address, 1, timeout, 0) <= 0:
        return False
    rings = parking_address + 8 * PARKING_RINGS
    return call_read(functions[4], bell, rings, 8 * (PARKING_FIELDS - PARKING_RINGS)) > 0


@callback("int32(int64, int64, int64, int64)")
def on_fragment(clientd: int, payload: int, length: int, header: int) -> int:
    """Handle one fragment for the inbox at address ``clientd`` (Aeron's controlled handler).

    ``payload`` is the address of its ``length`` bytes; ``header`` is not used. Return CONTINUE, or
    ABORT if the inbox has no room.
    """
    inbox = carray(pointer_to(clientd), (INBOX_FIELDS,), types.int64)
    frame_header = carray(
        pointer_to(payload - FRAME_HEADER_BYTES), (FRAME_HEADER_BYTES,), types.uint8
    )
    flags = frame_header[FLAGS_OFFSET]
    inbox[INBOX_FRAGMENTS] += 1
    if flags & UNFRAGMENTED_FLAGS != UNFRAGMENTED_FLAGS:
        session = carray(
            pointer_to(payload - FRAME_HEADER_BYTES + SESSION_OFFSET), (1,), types.uint32
        )[0]
        return gather_fragment(inbox, flags, types.int64(session), payload, length)
    if length > inbox[INBOX_FRAME_MAX]:
        inbox[INBOX_DISCARDED] += 1
        return CONTINUE
    if not has_room(inbox, length):
        return ABORT
    append_frame(inbox, payload, length, payload, 0)
    return CONTINUE


@callback("void(int64, int32, int64)")
def on_error(clientd: int, code: int, message: int) -> None:
    """Count a client error and keep its code, in i64[2] at ``clientd`` (Aeron's error handler)."""
    errors = carray(pointer_to(clientd), (2,), types.int64)
    errors[0] += 1
    errors[1] = code


@callback("void(int64)")
def on_publication_closed(clientd: int) -> None:
    """Count a closed publication in i64[1] at ``clientd`` (Aeron's close notification)."""
    closed = carray(pointer_to(clientd), (1,), types.int64)
    closed[0] += 1


@kernel("int64(int64[::1], int64[:, ::1], int64, int64[::1], int64, int64[::1], int64, int64)")
def poll_subscriptions(
    functions: Any,
    receivers: Any,
    first: int,
    inbox: Any,
    inbox_address: int,
    parking: Any,
    parking_address: int,
    wait_ns: int,
) -> int:
    """Poll all subscriptions in turn until frames arrive, the wait is over, or INBOX_WAKE is set.

    functions  i64[5]                  in   addresses: controlled poll, on_fragment, clock, ppoll,
                                            read
    receivers  i64[n, RECEIVER_FIELDS] in   the subscriptions
    first      i64                     in   index of the first one to poll
    inbox      i64[INBOX_FIELDS]       in/out; inbox_address is its address
    parking    i64[PARKING_FIELDS]     work memory for waiting, at parking_address
    wait_ns    i64                     in   0: poll once                           (nanoseconds)
    returns    i64                          0, or -1 if a poll failed
    """
    poll, handler, clock = functions[0], functions[1], functions[2]
    count = receivers.shape[0]
    inbox[INBOX_USED] = inbox[INBOX_COUNT] = inbox[INBOX_FULL] = 0
    end_ns = call_clock(clock) + wait_ns
    park_us = inbox[INBOX_PARK_US]
    busy_turns = 0
    while True:
        fragments_before = inbox[INBOX_FRAGMENTS]
        for turn in range(count):
            i = (first + turn) % count
            inbox[INBOX_STREAM] = receivers[i, 1]
            inbox[INBOX_SLOTS] = receivers[i, 2]
            inbox[INBOX_GATHERED] = receivers[i, 3]
            if call_poll(poll, receivers[i, 0], handler, inbox_address, FRAGMENTS_PER_TURN) < 0:
                return -1
            if inbox[INBOX_FULL]:
                return 0
        if inbox[INBOX_FRAGMENTS] != fragments_before and busy_turns < BUSY_TURNS_MAX:
            park_us = inbox[INBOX_PARK_US]  # data are arriving: complete what has begun
            busy_turns += 1
            continue
        left_us = (end_ns - call_clock(clock)) // 1000
        if inbox[INBOX_COUNT] > 0 or inbox[INBOX_WAKE] or left_us <= 0:
            return 0
        if not park(functions, inbox[INBOX_BELL], parking, parking_address, min(park_us, left_us)):
            park_us = max(park_us, min(2 * park_us, PARK_US_MAX))
