"""The wire by example: the bytes of each data message, and what is refused in which words."""

from __future__ import annotations

import pytest

from sparkstrom.base.errors import WireError
from sparkstrom.codec.messages import AskAfter, Chunk, Committed, Final, Update
from sparkstrom.codec.wire import CONTROL_BYTES_MAX, Kind, decode_untrusted, encode

UPDATE = Update(
    origin=7,
    seq=1,
    seen=2,
    epoch=3,
    batch=4,
    steps=5,
    form=2,
    tau_quanta=6,
    count=8,
    payload=b"bits",
)


def u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


def u64(value: int) -> bytes:
    return value.to_bytes(8, "little")


def test_an_update_is_laid_out_as_documented() -> None:
    kind, body = encode(UPDATE)
    head = u32(7) + u64(1) + u64(2) + u32(3) + u32(4) + u64(5)
    assert (kind, body) == (2, head + b"\2\0\0\0" + u32(6) + u32(8) + u32(4) + b"bits")


def test_a_commit_is_laid_out_as_documented() -> None:
    commit = Committed(
        commit=9, origin=7, seq=1, form=3, tau_quanta=6, count=8, payload=b"bits"
    )  # fmt: skip
    head = u64(9) + u32(7) + u64(1)
    assert encode(commit) == (3, head + b"\3\0\0\0" + u32(6) + u32(8) + u32(4) + b"bits")


def test_a_chunk_is_laid_out_as_documented() -> None:
    assert encode(Chunk(index=1, commit=2, payload=b"x")) == (4, u32(1) + u64(2) + u32(1) + b"x")


def test_control_is_messagepack_with_a_tag() -> None:
    assert encode(AskAfter(5)) == (1, b"\x82\xa4type\xa9ask-after\xa6commit\x05")


@pytest.mark.parametrize("kind", [0, 5, 255])
def test_unknown_kinds_are_refused(kind: int) -> None:
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
        (b"\x82\xa4type\xa9\x80sk-after\xa6commit\x05", "utf-8"),
        (b"\x91" * 5000, "control message"),
        (bytes(CONTROL_BYTES_MAX + 1), "65537 bytes, at most 65536"),
    ],
)
def test_what_is_no_control_message_is_refused(body: bytes, why: str) -> None:
    with pytest.raises(WireError, match=why):
        decode_untrusted(Kind.CONTROL, body)


def changed(at: int, byte: int) -> bytes:
    body = bytearray(encode(UPDATE)[1])
    body[at] = byte
    return bytes(body)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "update header needs 52 bytes, got 0"),
        (encode(UPDATE)[1][:-1], "announces 4 payload bytes, carries 3"),
        (encode(UPDATE)[1] + b"+", "announces 4 payload bytes, carries 5"),
        (changed(4, 0), "seq 0"),
        (changed(11, 0x80), "seq 9223372036854775809"),
        (changed(19, 0x80), "seen 9223372036854775810"),
        (changed(35, 0x80), "steps 9223372036854775813"),
        (changed(38, 1), "zeros belong"),
    ],
)
def test_what_is_no_update_is_refused(body: bytes, why: str) -> None:
    with pytest.raises(WireError, match=why):
        decode_untrusted(Kind.UPDATE, body)


@pytest.mark.parametrize(("commit", "seq"), [(0, 1), (1, 0)])
def test_commits_and_seqs_begin_at_one(commit: int, seq: int) -> None:
    body = u64(commit) + u32(7) + u64(seq) + bytes(16)
    with pytest.raises(WireError, match="0 is not within 1"):
        decode_untrusted(Kind.COMMITTED, body)


def test_a_chunk_of_a_commit_that_cannot_be_is_refused() -> None:
    with pytest.raises(WireError, match="commit"):
        decode_untrusted(Kind.CHUNK, u32(0) + u64(2**63) + u32(0))


def test_a_long_payload_comes_back() -> None:
    chunk = Chunk(index=0, commit=0, payload=bytes(1 << 20))
    assert decode_untrusted(*encode(chunk)) == chunk
    assert decode_untrusted(*encode(Final(0))) == Final(0)
