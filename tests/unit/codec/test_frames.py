"""Tests of sealed frames and of reassembly: what opens, and which pieces become messages."""

from __future__ import annotations

import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from sparkstrom.base.errors import WireError
from sparkstrom.codec.sealed_frames import (
    FRAMES,
    HEADER,
    KEY_BYTES,
    OVERHEAD_BYTES,
    TAG_BYTES,
    FrameError,
    Header,
    Reassembler,
    Seal,
    derive_key,
    split_body,
)

JOB = 0x1234_5678_9ABC_DEF0
SEAL = Seal(bytes(range(KEY_BYTES)), JOB)
HEAD = Header(kind=2, sender=7, receiver=0, edge=3, counter=11, piece=0, pieces=1)


def test_frame_round_trip() -> None:
    frame = SEAL.close(HEAD, b"body")
    assert len(frame) == OVERHEAD_BYTES + 4
    assert SEAL.open_untrusted(frame) == (HEAD, b"body")
    assert SEAL.open_untrusted(SEAL.close(HEAD, b"")) == (HEAD, b"")


def test_frame_header_is_clear_and_body_is_encrypted() -> None:
    """The header is readable without the key, and the body is encrypted."""
    frame = SEAL.close(HEAD, b"a body in the clear")
    clear = (b"SpSt", 1, 2, JOB, 7, 0, 3, 11, 0, 1, 19 + TAG_BYTES)
    assert HEADER.unpack(frame[: HEADER.size]) == clear
    assert b"body" not in frame


def test_frame_with_wrong_key_is_refused() -> None:
    with pytest.raises(WireError, match="not this job's key"):
        Seal(bytes(KEY_BYTES), JOB).open_untrusted(SEAL.close(HEAD, b"body"))


def test_frame_of_another_job_is_refused() -> None:
    with pytest.raises(WireError, match=r"a frame of another job: 0+1, this is 1234"):
        SEAL.open_untrusted(Seal(bytes(range(KEY_BYTES)), 1).close(HEAD, b"body"))


@given(data=st.data())
def test_frame_with_flipped_bit_is_refused(data: st.DataObject) -> None:
    frame = bytearray(SEAL.close(HEAD, b"body"))
    bit = data.draw(st.integers(0, 8 * len(frame) - 1))
    frame[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WireError):
        SEAL.open_untrusted(bytes(frame))


@pytest.mark.parametrize("length", range(OVERHEAD_BYTES + 4))
def test_truncated_frame_is_refused(length: int) -> None:
    with pytest.raises(WireError):
        SEAL.open_untrusted(SEAL.close(HEAD, b"body")[:length])


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_as_frame(frame: bytes) -> None:
    with pytest.raises(WireError):
        SEAL.open_untrusted(frame)


def test_piece_number_beyond_last_is_refused() -> None:
    with pytest.raises(WireError, match="piece 2 of 2"):
        SEAL.open_untrusted(SEAL.close(replace(HEAD, piece=2, pieces=2), b""))


def test_sender_without_id_has_random_nonce_prefix() -> None:
    """Otherwise equal counters of two senders without an id would give equal key streams."""
    strangers = [replace(HEAD, sender=None, edge=edge) for edge in (1, 2)]
    bodies = [SEAL.close(header, b"join")[HEADER.size :] for header in strangers]
    assert bodies[0][:4] != bodies[1][:4]


def test_sender_without_id_never_uses_nonce_of_node() -> None:
    """Senders without an id never use a node's nonces."""
    node = SEAL.close(replace(HEAD, sender=5), b"text")[HEADER.size :]
    stranger = SEAL.close(replace(HEAD, sender=None, edge=5), b"text")[HEADER.size :]
    assert node[:4] != stranger[:4]  # equal nonces would give equal bytes


# -- pieces --------------------------------------------------------------------------------------


def pieces(body: bytes, size: int, first: int = 1, kind: int = 2) -> list[tuple[Header, bytes]]:
    """Return the headers and pieces of a message that is cut into pieces of this size."""
    cut = split_body(body, size)
    return [(Header(kind, 7, 0, 3, first + i, i, len(cut)), piece) for i, piece in enumerate(cut)]


@pytest.mark.parametrize(
    ("body", "cut"),
    [
        (b"", [b""]),
        (b"abc", [b"abc"]),
        (b"abcd", [b"abc", b"d"]),
        (b"abcdef", [b"abc", b"def"]),
    ],
)
def test_body_is_split_into_pieces(body: bytes, cut: list[bytes]) -> None:
    assert split_body(body, 3) == cut


@given(bodies=st.lists(st.binary(max_size=20), max_size=5), size=st.integers(1, 25))
def test_pieces_are_reassembled_to_messages_in_order(bodies: list[bytes], size: int) -> None:
    """Messages of any length are reassembled in order."""
    joiner, counter, whole = Reassembler(20), 1, []
    for body in bodies:
        for header, piece in pieces(body, size, counter):
            counter += 1
            if (message := joiner.add_piece(header, piece)) is not None:
                whole.append(message)
    assert whole == bodies


@given(bodies=st.lists(st.binary(min_size=1, max_size=12), min_size=1, max_size=6), data=st.data())
def test_only_messages_without_lost_pieces_are_reassembled(
    bodies: list[bytes], data: st.DataObject
) -> None:
    """If pieces are lost, exactly the messages without losses are reassembled."""
    joiner, counter, expected, came = Reassembler(100), 1, [], []
    for body in bodies:
        cut = pieces(body, 3, counter)
        counter += len(cut)
        arrive = [data.draw(st.booleans()) for _ in cut]
        if all(arrive):
            expected.append(body)
        for (header, piece), arrives in zip(cut, arrive, strict=True):
            if arrives and (message := joiner.add_piece(header, piece)) is not None:
                came.append(message)
    assert came == expected


def test_piece_out_of_order_is_refused() -> None:
    """A late piece is refused as a repeated counter, and its message is lost."""
    joiner = Reassembler(100)
    first, second, third = pieces(b"abcdefghi", 3)
    assert joiner.add_piece(*first) is None
    assert joiner.add_piece(*third) is None
    with pytest.raises(WireError, match="counter 2 again, it was 3 already"):
        joiner.add_piece(*second)
    assert joiner.add_piece(*pieces(b"xyz", 3, 4)[0]) == b"xyz"


def test_pieces_of_interleaved_messages_are_not_joined() -> None:
    """Interleaved pieces of two messages are never joined; only the later message is complete."""
    joiner = Reassembler(100)
    ours, theirs = pieces(b"abcdef", 3), pieces(b"uvwxyz", 3, first=2)
    assert joiner.add_piece(*ours[0]) is None
    assert joiner.add_piece(*theirs[0]) is None
    assert joiner.add_piece(*theirs[1]) == b"uvwxyz"
    with pytest.raises(WireError, match="again"):
        joiner.add_piece(*ours[1])


def test_piece_of_another_kind_is_not_joined() -> None:
    """A piece whose header has another kind is not joined to the message."""
    joiner = Reassembler(100)
    (head, start), (tail, end) = pieces(b"abcdef", 3)
    assert joiner.add_piece(head, start) is None
    assert joiner.add_piece(replace(tail, kind=3), end) is None


def test_piece_with_another_piece_count_is_not_joined() -> None:
    """A piece whose header has another number of pieces is not joined to the message."""
    joiner = Reassembler(100)
    (head, start), (tail, end) = pieces(b"abcdef", 3)
    assert joiner.add_piece(head, start) is None
    assert joiner.add_piece(replace(tail, pieces=3), end) is None


def test_a_repeated_frame_is_refused() -> None:
    joiner = Reassembler(100)
    ((header, body),) = pieces(b"abc", 3)
    assert joiner.add_piece(header, body) == b"abc"
    with pytest.raises(WireError, match="counter 1 again"):
        joiner.add_piece(header, body)


def test_message_beyond_maximum_length_is_refused() -> None:
    """A message that exceeds the maximum length raises ``WireError``; the next one is accepted."""
    joiner = Reassembler(5)
    (head, start), (tail, end) = pieces(b"abcdef", 3)
    assert joiner.add_piece(head, start) is None
    with pytest.raises(WireError, match="more than 5 bytes"):
        joiner.add_piece(tail, end)
    assert joiner.add_piece(*pieces(b"abcde", 9, 3)[0]) == b"abcde"


def test_each_purpose_has_its_own_derived_key() -> None:
    """The test vector is HKDF-SHA256 without salt (RFC 5869), computed with HMAC."""
    fit_key = bytes(range(KEY_BYTES))
    first = hmac.digest(bytes(32), fit_key, "sha256")
    assert derive_key(fit_key, FRAMES) == hmac.digest(first, FRAMES + b"\1", "sha256")
    keys = {derive_key(fit_key, purpose) for purpose in (FRAMES, b"another")} | {fit_key}
    assert len(keys) == 3
    frame = Seal.from_fit_key(fit_key, JOB).close(HEAD, b"body")
    assert Seal.from_fit_key(fit_key, JOB).open_untrusted(frame) == (HEAD, b"body")
    with pytest.raises(FrameError, match="seal"):
        Seal(fit_key, JOB).open_untrusted(frame)
