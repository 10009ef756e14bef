"""Encode and decode messages; an encoded message is a ``Kind`` and a body of bytes.

Control messages are MessagePack; data messages have fixed little-endian headers. Bodies come from
authenticated frames, but are still checked before memory is allocated. An invalid body raises
WireError and no other exception.
"""

from __future__ import annotations

import enum
import struct
from typing import Any, get_args

import msgspec

from sparkstrom.base.errors import WireError
from sparkstrom.codec.messages import (
    Chunk,
    Commit,
    Control,
    Data,
    MergedRange,
    Message,
    OptimizerChunk,
    OptimizerRequest,
    Payload,
    ResendRequest,
    TrainingFailure,
    Update,
)


class Kind(enum.IntEnum):
    """The kind of message that a body encodes: one byte on the wire, never 0."""

    CONTROL = 1
    UPDATE = 2
    COMMITTED = 3  # a ``Commit``
    CHUNK = 4  # of a snapshot
    MERGED = 5  # a ``MergedRange``: the sum of several commits
    UPDATER = 6  # an ``OptimizerChunk``


# u32 origin | u64 seq | u64 seen | u32 epoch | u32 batch | u64 steps
# | u8 form | 3 zero | u32 tau_quanta | u32 count | u32 payload_bytes | payload
UPDATE_HEADER = struct.Struct("<IQQIIQB3xIII")

# u64 commit | u32 origin | u64 seq | u64 slowest | u8 form | 3 zero | u32 tau_quanta | u32 count
# | u32 payload_bytes | payload             (empty payload: sent to the update's own origin)
COMMITTED_HEADER = struct.Struct("<QIQQB3xIII")

# u32 index | u64 commit | u32 payload_bytes | payload
CHUNK_HEADER = struct.Struct("<IQI")

# u64 after | u64 commit | u32 count | u32 origins | u32 payload_bytes
# | origins x (u32 id | u64 seq) | payload
MERGED_HEADER = struct.Struct("<QQIII")
LAST_SEQ = struct.Struct("<IQ")

# u32 asker | u64 copy | u32 index | u32 count | u32 payload_bytes | payload
UPDATER_HEADER = struct.Struct("<IQIII")

# Fields in which None is encoded as 0, because no valid node or copy has the number 0 there.
ZERO_FOR_NONE: dict[type[Message], str] = {
    ResendRequest: "origin",
    OptimizerRequest: "copy",
    TrainingFailure: "node",
}

DATA = frozenset(get_args(Data))  # types of data messages
CONTROL_BYTES_MAX = 1 << 20  # the longest control message lists the seqs of 40,000 origins

_to_msgpack = msgspec.msgpack.Encoder().encode
_control = msgspec.msgpack.Decoder(Control)


def encode(message: Message) -> tuple[Kind, bytes]:
    """Return the message's kind and body."""
    match message:
        case Update():
            head = UPDATE_HEADER.pack(
                message.origin,
                message.seq,
                message.seen,
                message.epoch,
                message.batch,
                message.steps,
                *_payload_header_fields(message.payload),
            )
            return Kind.UPDATE, head + message.payload.data
        case Commit():
            head = COMMITTED_HEADER.pack(
                message.commit,
                message.origin,
                message.seq,
                message.slowest,
                *_payload_header_fields(message.payload),
            )
            return Kind.COMMITTED, head + message.payload.data
        case Chunk():
            head = CHUNK_HEADER.pack(message.index, message.commit, len(message.payload))
            return Kind.CHUNK, head + message.payload
        case MergedRange():
            head = MERGED_HEADER.pack(
                message.after,
                message.commit,
                message.count,
                len(message.last),
                len(message.payload),
            )
            last = b"".join(LAST_SEQ.pack(*pair) for pair in message.last)
            return Kind.MERGED, head + last + message.payload
        case OptimizerChunk():
            fields = (message.asker, message.copy, message.index, message.count)
            head = UPDATER_HEADER.pack(*fields, len(message.payload))
            return Kind.UPDATER, head + message.payload
        case _:
            return Kind.CONTROL, _to_msgpack(_none_to_zero(message))


def _none_to_zero(message: Control) -> Control:
    """Return the message with 0 in place of None in its ``ZERO_FOR_NONE`` field, if it has one."""
    field = ZERO_FOR_NONE.get(type(message))
    if field is None:
        return message
    value = getattr(message, field)
    assert value != 0, f"a {field} of 0 is None"
    return message if value is not None else msgspec.structs.replace(message, **{field: 0})


def _zero_to_none(message: Control) -> Control:
    """Return the message with None in place of 0 in its ``ZERO_FOR_NONE`` field, if it has one.

    Raise WireError if that field is null on the wire.
    """
    field = ZERO_FOR_NONE.get(type(message))
    if field is None:
        return message
    value = getattr(message, field)
    if value is None:
        raise WireError(f"control message: its {field} is null")
    return message if value != 0 else msgspec.structs.replace(message, **{field: None})


def _payload_header_fields(payload: Payload) -> tuple[int, int, int, int]:
    """Return a payload's fields in a data header: form, tau, number of entries and bytes."""
    return payload.form, payload.tau_quanta, payload.count, len(payload.data)


def decode_untrusted(kind: int, body: bytes) -> Message:
    """Decode a body of this kind. Raise WireError, and no other error, if it is invalid."""
    if kind == Kind.CONTROL:
        return _decode_control(body)
    if kind == Kind.UPDATE:
        return _decode_update(body)
    if kind == Kind.COMMITTED:
        return _decode_commit(body)
    if kind == Kind.CHUNK:
        return _decode_chunk(body)
    if kind == Kind.MERGED:
        return _decode_merged(body)
    if kind == Kind.UPDATER:
        return _decode_optimizer_chunk(body)
    raise WireError(f"unknown kind of message {kind}")


def is_data(message: Message) -> bool:
    """Return whether the message is sent on a data stream; all others use a control stream."""
    return type(message) in DATA


def _decode_control(body: bytes) -> Control:
    """Decode a control message. Raise WireError if it is invalid or too long."""
    if len(body) > CONTROL_BYTES_MAX:
        raise WireError(f"control message of {len(body)} bytes, at most {CONTROL_BYTES_MAX}")
    try:
        message: Control = _control.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"control message: {error}") from None
    return _zero_to_none(message)


def _split_header_and_payload(
    header: struct.Struct, body: bytes, what: str
) -> tuple[list[Any], bytes]:
    """Split a body; return its header's fields, except for the last, and the payload.

    The last field is the payload's length. ``what`` names the kind of message in error texts. Raise
    WireError if the body is too short, the length is wrong or padding is not zero.
    """
    if len(body) < header.size:
        raise WireError(f"{what} header needs {header.size} bytes, got {len(body)}")
    *fields, payload_bytes = header.unpack_from(body)
    payload = body[header.size :]
    if payload_bytes != len(payload):
        raise WireError(f"{what} announces {payload_bytes} payload bytes, carries {len(payload)}")
    if header.pack(*fields, payload_bytes) != body[: header.size]:
        raise WireError(f"{what} header has bits where zeros belong")
    return fields, payload


def _decode_update(body: bytes) -> Update:
    """Decode an update. Raise WireError if it is invalid."""
    fields, data = _split_header_and_payload(UPDATE_HEADER, body, "update")
    origin, seq, seen, epoch, batch, steps, form, tau_quanta, count = fields
    _check_number("seq", seq)
    _check_number("seen", seen, least=0)
    _check_number("steps", steps, least=0)
    return Update(
        origin=origin,
        seq=seq,
        seen=seen,
        epoch=epoch,
        batch=batch,
        steps=steps,
        payload=Payload(form, tau_quanta, count, data),
    )


def _decode_commit(body: bytes) -> Commit:
    """Decode a commit message. Raise WireError if it is invalid."""
    fields, data = _split_header_and_payload(COMMITTED_HEADER, body, "commit")
    commit, origin, seq, slowest, form, tau_quanta, count = fields
    _check_number("commit", commit)
    _check_number("seq", seq)
    _check_number("slowest", slowest, least=0)
    payload = Payload(form, tau_quanta, count, data)
    return Commit(commit=commit, origin=origin, seq=seq, slowest=slowest, payload=payload)


def _decode_chunk(body: bytes) -> Chunk:
    """Decode a chunk of a snapshot. Raise WireError if it is invalid."""
    fields, payload = _split_header_and_payload(CHUNK_HEADER, body, "chunk")
    index, commit = fields
    _check_number("commit", commit, least=0)
    return Chunk(index=index, commit=commit, payload=payload)


def _decode_merged(body: bytes) -> MergedRange:
    """Decode a message with a sum of commits. Raise WireError if it is invalid."""
    if len(body) < MERGED_HEADER.size:
        raise WireError(f"merged header needs {MERGED_HEADER.size} bytes, got {len(body)}")
    after, commit, count, origins, payload_bytes = MERGED_HEADER.unpack_from(body)
    begin = MERGED_HEADER.size + origins * LAST_SEQ.size
    if begin + payload_bytes != len(body):
        raise WireError(f"merged range announces {begin + payload_bytes} bytes, has {len(body)}")
    _check_number("after", after, least=0)
    _check_number("commit", commit, least=after + 1)
    last = list(LAST_SEQ.iter_unpack(body[MERGED_HEADER.size : begin]))
    for _, seq in last:
        _check_number("seq", seq)
    payload = body[begin:]
    return MergedRange(after=after, commit=commit, last=last, count=count, payload=payload)


def _decode_optimizer_chunk(body: bytes) -> OptimizerChunk:
    """Decode a chunk of optimizer state. Raise WireError if it is invalid."""
    fields, payload = _split_header_and_payload(UPDATER_HEADER, body, "updater chunk")
    asker, copy, index, count = fields
    _check_number("copy", copy)
    if not index < count:
        raise WireError(f"updater chunk {index} of {count}")
    return OptimizerChunk(asker=asker, copy=copy, index=index, count=count, payload=payload)


def _check_number(name: str, value: int, least: int = 1) -> None:
    """Raise WireError, naming field ``name``, unless ``least`` <= value < 2^63."""
    if not least <= value < 2**63:
        raise WireError(f"{name} {value} is not within {least} .. 2^63 - 1")
