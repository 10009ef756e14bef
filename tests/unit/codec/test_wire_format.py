"""Tests that the examples in docs/wire-format.md are what the code encodes and decodes."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from sparkstrom.base.errors import WireError
from sparkstrom.base.identity import MASTER
from sparkstrom.codec.messages import Control, MergedRange, Release
from sparkstrom.codec.payload import (
    decode_quanta_untrusted,
    decode_update_untrusted,
    encode_quanta,
)
from sparkstrom.codec.sealed_frames import HEADER, KEY_BYTES, Header, Seal, direct_header
from sparkstrom.codec.wire import Kind, decode_untrusted, encode
from sparkstrom.encoding.forms import Form

PAGE = (Path(__file__).parents[3] / "docs" / "wire-format.md").read_text(encoding="utf-8")


def example(kind: str) -> list[str]:
    """Return the lines of the page's code block with this info string."""
    found = re.search(rf"^```{kind}\n(.*?)^```", PAGE, re.M | re.S)
    assert found is not None
    return found.group(1).splitlines()


def named_numbers(line: str) -> dict[str, int]:
    """Return the numbers of a line of alternating names and numbers."""
    words = line.split()
    return {name: int(value) for name, value in zip(words[::2], words[1::2], strict=True)}


def test_frame_header_example_matches_code():
    first, *rest = example("frame")
    said = named_numbers(first)
    header = Header(*(said[n] for n in ("kind", "sender", "receiver", "edge", "counter")), 0, 1)
    frame = Seal(bytes(KEY_BYTES), said["job"]).close(header, bytes(said["body"]))
    assert frame[: HEADER.size] == bytes.fromhex("".join(rest))


def test_example_of_direct_message_to_master_matches_code():
    """The example of a direct message to the master has the bytes of the code."""
    first, *rest = example("told")
    said = named_numbers(first)
    header = direct_header(
        said["token"], said["count"], said["kind"], said["piece"], said["pieces"]
    )
    assert (header.session, header.count) == (said["token"], said["count"])
    frame = Seal(bytes(KEY_BYTES), said["job"]).close(header, bytes(said["body"]))
    assert frame[: HEADER.size] == bytes.fromhex("".join(rest))


def test_example_of_direct_message_from_master_matches_code():
    """The example is decrypted by the page's description: the token follows the header."""
    first, *rest = example("direct")
    said, frame = named_numbers(first), bytes.fromhex("".join(rest))
    clear, sealed = frame[: HEADER.size], frame[HEADER.size :]
    key, nonce = bytes(KEY_BYTES), struct.pack("<IQ", MASTER, said["counter"])
    body = AESGCM(key).decrypt(nonce, sealed, clear + struct.pack("<Q", said["token"]))
    assert decode_untrusted(Kind.CONTROL, body) == Release("slot")
    header = Header(Kind.CONTROL, MASTER, said["receiver"], 0, said["counter"], 0, 1)
    seal = Seal(key, said["job"])
    assert seal.close(header, body, said["token"]) == frame
    assert seal.open_untrusted(frame, said["token"]) == (header, body)
    with pytest.raises(WireError, match="for another process"):
        seal.open_untrusted(frame, said["token"] + 1)


@pytest.mark.parametrize("name", ["control", "report"])
def test_control_message_examples_match_code(name):
    first, *rest = example(name)
    tag, fields = first.split(" ", 1)
    said = msgspec.convert({"type": tag, **json.loads(fields)}, Control)
    body = bytes.fromhex("".join(rest))
    assert decode_untrusted(Kind.CONTROL, body) == said
    assert encode(said) == (Kind.CONTROL, body)


def test_table_lists_every_control_message_tag():
    """The page's table of control messages has exactly the tags of the code."""
    section = PAGE[PAGE.index("### Control") : PAGE.index("### Data")]
    listed = {tag for line in section.splitlines() for tag in re.findall(r"`([a-z-]+)`", line[:30])}
    tags = {msgspec.inspect.type_info(kind).tag for kind in get_args(Control)}
    assert tags == listed - {"type"}


def test_merged_range_example_matches_code():
    first, *rest = example("merged")
    words = first.split()
    said = named_numbers(" ".join(words[:6]))
    body = bytes.fromhex("".join(rest))
    last = [tuple(map(int, pair.split(":"))) for pair in words[6:]]
    merged = MergedRange(**said, last=last, payload=b"sum")
    assert encode(merged) == (Kind.MERGED, body)
    assert decode_untrusted(Kind.MERGED, body) == merged


@pytest.mark.parametrize("kind", ["bitmap", "gaps", "levels"])
def test_payload_examples_match_code(kind):
    first, data, adds = example(kind)
    said = named_numbers(first)
    wanted = [tuple(map(int, entry.split(":"))) for entry in adds.split()[1:]]
    form = said.get("form", int(Form.GAPS))
    payload = bytes.fromhex(data.removeprefix("bytes"))
    indices, quanta = decode_update_untrusted(payload, form, len(wanted), said["tau"], said["n"])
    assert list(zip(indices.tolist(), quanta.tolist(), strict=True)) == wanted


@pytest.mark.parametrize("kind", ["sum-sparse", "sum-dense"])
def test_sum_examples_match_code(kind):
    first, data, adds = example(kind)
    wanted = [tuple(map(int, entry.split(":"))) for entry in adds.split()[1:]]
    payload = bytes.fromhex(data.removeprefix("bytes"))
    total = decode_quanta_untrusted(payload, named_numbers(first)["n"])
    assert list(zip(*(part.tolist() for part in total.hits), strict=True)) == wanted
    assert encode_quanta(total) == payload
