"""Tests of the wire format by example: the bytes of each data message, and error messages."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import pytest

from sparkstrom.base.errors import WireError
from sparkstrom.codec.messages import (
    Activity,
    AttachReply,
    Chunk,
    Commit,
    CommitsRequest,
    Control,
    Heartbeat,
    MergedRange,
    OptimizerChunk,
    OptimizerRequest,
    Payload,
    ProbeReply,
    ResendRequest,
    Status,
    TrainingFailure,
    Update,
)
from sparkstrom.codec.wire import CONTROL_BYTES_MAX, Kind, decode_untrusted, encode, is_data

UPDATE = Update(
    origin=7,
    seq=1,
    seen=2,
    epoch=3,
    batch=4,
    steps=5,
    payload=Payload(form=2, tau_quanta=6, count=8, data=b"bits"),
)


MERGED = MergedRange(after=3, commit=9, last=[(7, 4), (8, 2)], count=5, payload=b"sum")

UPDATER = OptimizerChunk(asker=7, copy=5, index=1, count=2, payload=b"mom")


def u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


def u64(value: int) -> bytes:
    return value.to_bytes(8, "little")


def test_update_has_documented_layout() -> None:
    kind, body = encode(UPDATE)
    head = u32(7) + u64(1) + u64(2) + u32(3) + u32(4) + u64(5)
    assert (kind, body) == (2, head + b"\2\0\0\0" + u32(6) + u32(8) + u32(4) + b"bits")


def test_commit_has_documented_layout() -> None:
    commit = Commit(commit=9, origin=7, seq=1, slowest=5, payload=Payload(3, 6, 8, b"bits"))
    head = u64(9) + u32(7) + u64(1) + u64(5)
    assert encode(commit) == (3, head + b"\3\0\0\0" + u32(6) + u32(8) + u32(4) + b"bits")


def test_chunk_has_documented_layout() -> None:
    assert encode(Chunk(index=1, commit=2, payload=b"x")) == (4, u32(1) + u64(2) + u32(1) + b"x")


def test_merged_range_has_documented_layout() -> None:
    head = u64(3) + u64(9) + u32(5) + u32(2) + u32(3)
    table = u32(7) + u64(4) + u32(8) + u64(2)
    assert encode(MERGED) == (5, head + table + b"sum")


def test_optimizer_chunk_has_documented_layout() -> None:
    head = u32(7) + u64(5) + u32(1) + u32(2) + u32(3)
    assert encode(UPDATER) == (6, head + b"mom")


def test_control_message_is_tagged_messagepack() -> None:
    assert encode(CommitsRequest(5)) == (1, b"\x82\xa4type\xa9ask-after\xa6commit\x05")


def test_heartbeat_status_is_encoded_without_field_names() -> None:
    """A heartbeat has hundreds of statuses, of which field names would be the largest part."""
    status = Status(
        node=1, edge=2, count=3, after_seq=4, epoch=5, batch=6, steps=7, activity=Activity.STEPPING
    )
    _, body = encode(
        Heartbeat(received=9, bytes_received=0, catching=False, stamp=8, statuses=[status])
    )
    assert body.endswith(b"\x91\x9e\x01\x02\x03\x04\x05\x06\x07\x02\xc0\xc0\xc0\x00\xc2\xc2")


@pytest.mark.parametrize(
    ("message", "body"),
    [
        (ResendRequest(None), {"type": "again", "origin": 0}),
        (ResendRequest(7), {"type": "again", "origin": 7}),
        (OptimizerRequest(7, None, 3), {"type": "ask-updater", "asker": 7, "copy": 0, "index": 3}),
        (OptimizerRequest(7, 5, 3), {"type": "ask-updater", "asker": 7, "copy": 5, "index": 3}),
        (
            TrainingFailure(node=None, reason="r", trace="t"),
            {"type": "failed", "node": 0, "reason": "r", "trace": "t", "host": "", "partition": 0}
            | {"attempt": 0, "phase": ""},
        ),
    ],
)
def test_none_is_encoded_as_zero_in_control_messages(message: Control, body: Any) -> None:
    """None is encoded as 0, and 0 is decoded as None."""
    encoded = msgspec.msgpack.encode(body)
    assert encode(message) == (Kind.CONTROL, encoded)
    assert decode_untrusted(Kind.CONTROL, encoded) == message


@pytest.mark.parametrize(
    "body",
    [
        {"type": "again", "origin": None},
        {"type": "ask-updater", "asker": 7, "copy": None, "index": 3},
        {"type": "failed", "node": None, "reason": "NaN", "trace": "t"},
    ],
)
def test_null_in_control_message_is_refused(body: Any) -> None:
    with pytest.raises(WireError, match="null"):
        decode_untrusted(Kind.CONTROL, msgspec.msgpack.encode(body))


@pytest.mark.parametrize("kind", [0, max(Kind) + 1, 255])
def test_unknown_message_kind_is_refused(kind: int) -> None:
    with pytest.raises(WireError, match=f"unknown kind of message {kind}"):
        decode_untrusted(kind, b"")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "truncated"),
        (b"\x82\xa4type\xa9ask-after\xa6commit", "truncated"),
        (b"\x82\xa4type\xa9ask-after\xa6commit\x05\x00", "trailing"),
        (b"\x82\xa4type\xa9ask-befor\xa6commit\x05", "ask-befor"),
        (b"\x82\xa4type\xa9ask-after\xa6commit\xff", "Expected `int` >= 0"),
        (b"\x82\xa4type\xa9ask-after\xa6commit\xcf" + b"\xff" * 8, "commit"),
        (b"\x81\xa4type\xa9ask-after", "missing required field `commit`"),
        (b"\x82\xa4type\xa9\x80sk-after\xa6commit\x05", "(?i)utf-8"),
        (b"\x91" * 5000, "control message"),
        (bytes(CONTROL_BYTES_MAX + 1), "1048577 bytes, at most 1048576"),
    ],
)
def test_malformed_control_message_is_refused(body: bytes, why: str) -> None:
    with pytest.raises(WireError, match=why):
        decode_untrusted(Kind.CONTROL, body)


def update_with_byte(at: int, byte: int) -> bytes:
    """Return the encoded update with one byte replaced."""
    body = bytearray(encode(UPDATE)[1])
    body[at] = byte
    return bytes(body)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "update header needs 52 bytes, got 0"),
        (encode(UPDATE)[1][:-1], "announces 4 payload bytes, carries 3"),
        (encode(UPDATE)[1] + b"+", "announces 4 payload bytes, carries 5"),
        (update_with_byte(4, 0), "seq 0"),
        (update_with_byte(11, 0x80), "seq 9223372036854775809"),
        (update_with_byte(19, 0x80), "seen 9223372036854775810"),
        (update_with_byte(35, 0x80), "steps 9223372036854775813"),
        (update_with_byte(38, 1), "zeros belong"),
    ],
)
def test_malformed_update_is_refused(body: bytes, why: str) -> None:
    with pytest.raises(WireError, match=why):
        decode_untrusted(Kind.UPDATE, body)


@pytest.mark.parametrize(("commit", "seq"), [(0, 1), (1, 0)])
def test_commit_or_seq_zero_is_refused(commit: int, seq: int) -> None:
    body = u64(commit) + u32(7) + u64(seq) + u64(0) + bytes(16)
    with pytest.raises(WireError, match="0 is not within 1"):
        decode_untrusted(Kind.COMMITTED, body)


def test_chunk_with_too_large_commit_is_refused() -> None:
    with pytest.raises(WireError, match="commit"):
        decode_untrusted(Kind.CHUNK, u32(0) + u64(2**63) + u32(0))


def merged_with(at: int, field: bytes) -> bytes:
    """Return the encoded merged range with these bytes at an offset."""
    body = encode(MERGED)[1]
    return body[:at] + field + body[at + len(field) :]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "merged header needs 28 bytes, got 0"),
        (encode(MERGED)[1][:-1], "merged range announces 55 bytes, has 54"),
        (encode(MERGED)[1] + b"+", "merged range announces 55 bytes, has 56"),
        (merged_with(0, u64(2**63)), "after 9223372036854775808"),
        (merged_with(8, u64(3)), "commit 3 is not within 4"),
        (merged_with(20, u32(3)), "announces 67 bytes"),
        (merged_with(20, u32(2**32 - 1)), "announces 51539607571 bytes, has 55"),
        (merged_with(24, u32(2**32 - 1)), "announces 4294967347 bytes, has 55"),
        (merged_with(32, u64(0)), "seq 0"),
        (merged_with(44, u64(2**63)), "seq 9223372036854775808"),
    ],
)
def test_malformed_merged_range_is_refused(body: bytes, why: str) -> None:
    with pytest.raises(WireError, match=why):
        decode_untrusted(Kind.MERGED, body)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ((7, 0, 0, 1, 0), "copy 0"),
        ((7, 2**63, 0, 1, 0), "copy 9223372036854775808"),
        ((7, 1, 1, 1, 0), "updater chunk 1 of 1"),
        ((7, 1, 0, 0, 0), "updater chunk 0 of 0"),
        ((7, 1, 0, 1, 9), "announces 9 payload bytes, carries 0"),
    ],
)
def test_malformed_optimizer_chunk_is_refused(fields: tuple[int, ...], why: str) -> None:
    asker, copy, *rest = fields
    body = u32(asker) + u64(copy) + b"".join(map(u32, rest))
    with pytest.raises(WireError, match=why):
        decode_untrusted(Kind.UPDATER, body)


def control_without_its_list(message: AttachReply | Heartbeat) -> bytes:
    """Return the message whose last field, an empty list, announces 2^32 - 1 entries instead."""
    return encode(message)[1][:-1] + b"\xdd" + b"\xff" * 4


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (Kind.MERGED, merged_with(20, u32(2**32 - 1))),
        (Kind.MERGED, merged_with(24, u32(2**32 - 1))),
        (Kind.UPDATE, encode(UPDATE)[1][:48] + u32(2**32 - 1)),
        (
            Kind.CONTROL,
            control_without_its_list(AttachReply(base=1, snapshot=False, last=[])),
        ),
        (
            Kind.CONTROL,
            control_without_its_list(
                Heartbeat(received=1, bytes_received=1, catching=False, stamp=1, statuses=[])
            ),
        ),
        (Kind.CONTROL, b"\xdf" + b"\xff" * 4),
    ],
)
def test_announced_length_allocates_no_memory_before_check(kind: Kind, body: bytes) -> None:
    """A message that announces many bytes is refused before memory for them is allocated."""
    with pytest.raises(WireError):
        decode_untrusted(kind, body)
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            decode_untrusted(kind, body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 16


def test_chunk_of_one_mebibyte_round_trips() -> None:
    chunk = Chunk(index=0, commit=0, payload=bytes(1 << 20))
    assert decode_untrusted(*encode(chunk)) == chunk
    assert decode_untrusted(*encode(ProbeReply(0))) == ProbeReply(0)


def test_attach_reply_with_40000_origins_fits_control_message() -> None:
    """An ``AttachReply`` with the sequence numbers of 40,000 workers fits a control message."""
    attached = AttachReply(
        base=2**40, snapshot=True, last=[(n, 2**40) for n in range(2**17, 2**17 + 40_000)]
    )
    kind, body = encode(attached)
    assert CONTROL_BYTES_MAX / 2 < len(body) <= CONTROL_BYTES_MAX
    assert decode_untrusted(kind, body) == attached


def test_merged_range_of_40000_origins_round_trips() -> None:
    merged = MergedRange(
        after=0, commit=2**62, last=[(n, n + 1) for n in range(40_000)], count=7, payload=b""
    )
    assert decode_untrusted(*encode(merged)) == merged


def test_messages_with_parameters_or_states_are_data_not_control() -> None:
    """Otherwise a heartbeat could wait behind megabytes for longer than its lease."""
    commit = Commit(commit=1, origin=7, seq=1, payload=Payload(1, 2, 1, b"bits"))
    carriers = [UPDATE, commit, Chunk(index=0, commit=0, payload=b"x"), MERGED, UPDATER]
    assert [is_data(message) for message in carriers] == [True] * 5
    assert not is_data(CommitsRequest(1))
