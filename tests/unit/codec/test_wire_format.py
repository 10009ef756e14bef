"""The examples in docs/wire-format.md are true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sparkstrom.codec.frames import HEADER, KEY_BYTES, Header, Seal
from sparkstrom.codec.payload import decode_update_untrusted
from sparkstrom.encoding.forms import Form

PAGE = (Path(__file__).parents[3] / "docs" / "wire-format.md").read_text(encoding="utf-8")


def example(kind: str) -> list[str]:
    found = re.search(rf"^```{kind}\n(.*?)^```", PAGE, re.M | re.S)
    assert found is not None
    return found.group(1).splitlines()


def named_numbers(line: str) -> dict[str, int]:
    words = line.split()
    return {name: int(value) for name, value in zip(words[::2], words[1::2], strict=True)}


def test_frame_header():
    first, *rest = example("frame")
    said = named_numbers(first)
    header = Header(*(said[n] for n in ("kind", "sender", "receiver", "edge", "counter")), 0, 1)
    frame = Seal(bytes(KEY_BYTES), said["job"]).close(header, bytes(said["body"]))
    assert frame[: HEADER.size] == bytes.fromhex("".join(rest))


@pytest.mark.parametrize("kind", ["bitmap", "gaps"])
def test_payload(kind):
    first, data, adds = example(kind)
    said = named_numbers(first)
    wanted = [tuple(map(int, entry.split(":"))) for entry in adds.split()[1:]]
    form = said.get("form", int(Form.GAPS))
    payload = bytes.fromhex(data.removeprefix("bytes"))
    indices, quanta = decode_update_untrusted(payload, form, len(wanted), said["tau"], said["n"])
    assert list(zip(indices.tolist(), quanta.tolist(), strict=True)) == wanted
