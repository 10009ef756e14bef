"""Laws of the wire format: encoded messages decode to themselves; any bytes are safe to decode."""

from __future__ import annotations

import contextlib
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkstrom.base.errors import WireError
from sparkstrom.codec import messages as m
from sparkstrom.codec.wire import ZERO_FOR_NONE, Kind, decode_untrusted, encode, is_data

U8, U16, U32 = (st.integers(0, 2**bits - 1) for bits in (8, 16, 32))
U63 = st.integers(0, 2**63 - 1)
NUMBER = st.integers(1, 2**63 - 1)  # of an update or a commit
PAYLOAD = st.binary(max_size=200)
ENCODED = st.builds(m.Payload, form=U8, tau_quanta=U32, count=U32, data=PAYLOAD)

DATA: dict[type, dict[str, st.SearchStrategy[Any]]] = {
    m.Update: {
        "origin": U32,
        "seq": NUMBER,
        "seen": U63,
        "epoch": U32,
        "batch": U32,
        "steps": U63,
        "payload": ENCODED,
    },
    m.Commit: {
        "commit": NUMBER,
        "origin": U32,
        "seq": NUMBER,
        "slowest": U63,
        "payload": ENCODED,
    },
    m.Chunk: {"index": U32, "commit": U63, "payload": PAYLOAD},
    m.MergedRange: {
        "after": st.integers(0, 2**62),
        "commit": st.integers(2**62 + 1, 2**63 - 1),
        "last": st.lists(st.tuples(U32, NUMBER), max_size=3),
        "count": U32,
        "payload": PAYLOAD,
    },
    m.OptimizerChunk: {
        "asker": U32,
        "copy": NUMBER,
        "index": st.integers(0, 2**31),
        "count": st.integers(2**31 + 1, 2**32 - 1),
        "payload": PAYLOAD,
    },
}
CONTROL: tuple[type, ...] = get_args(m.Control)


def values(annotation: msgspec.inspect.Type) -> st.SearchStrategy[Any]:
    """Return a strategy for all values that a field of this type may have."""
    match annotation:
        case msgspec.inspect.IntType(ge=low, lt=beyond, le=high):
            return st.integers(low or 0, high if high is not None else (beyond or 0) - 1)
        case msgspec.inspect.StrType(max_length=longest):
            return st.text(max_size=min(longest or 20, 20))
        case msgspec.inspect.FloatType():
            return st.floats(allow_nan=False)
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.EnumType(cls=cls):
            return st.sampled_from(list(cls))
        case msgspec.inspect.StructType(cls=cls):
            return structs(cls)
        case msgspec.inspect.ListType(item_type=item):
            return st.lists(values(item), max_size=3)
        case msgspec.inspect.TupleType(item_types=items):
            return st.tuples(*map(values, items))
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(values(key), values(value), max_size=3)
        case msgspec.inspect.UnionType(types=types):
            return st.one_of(*map(values, types))
        case msgspec.inspect.NoneType():
            return st.none()
    raise AssertionError(f"no values for {annotation}")


def structs(cls: type) -> st.SearchStrategy[Any]:
    """Return a strategy for messages of this type."""
    described = msgspec.inspect.type_info(cls)
    assert isinstance(described, msgspec.inspect.StructType)
    fields = {field.name: values(field.type) for field in described.fields}
    if (name := ZERO_FOR_NONE.get(cls)) is not None:
        fields[name] = fields[name].filter(lambda value: value != 0)
    return st.builds(cls, **fields)


def all_messages() -> st.SearchStrategy[m.Message]:
    """Return a strategy for messages of all types."""
    data = [st.builds(cls, **fields) for cls, fields in DATA.items()]
    return st.one_of(*map(structs, CONTROL), *data)


@pytest.mark.parametrize("cls", [*CONTROL, *DATA], ids=lambda cls: cls.__name__)
@given(data=st.data())
def test_encoded_message_round_trips(cls: type, data: st.DataObject) -> None:
    message = data.draw(st.builds(cls, **DATA[cls]) if cls in DATA else structs(cls))
    kind, body = encode(message)
    assert decode_untrusted(kind, body) == message
    assert is_data(message) == (cls in DATA)


@given(kind=st.integers(0, 255), body=st.binary(max_size=300))
def test_any_bytes_decode_to_message_or_raise_wire_error(kind: int, body: bytes) -> None:
    """Any bytes raise WireError, or decode to a message that can be encoded."""
    with contextlib.suppress(WireError):
        encode(decode_untrusted(kind, body))


@given(message=all_messages(), data=st.data())
def test_changed_bytes_raise_wire_error_or_decode_to_unique_encoding(
    message: m.Message, data: st.DataObject
) -> None:
    """Changed bytes raise WireError or are a message; data messages have only one encoding."""
    kind, body = encode(message)
    changed = bytearray(body)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(body) - 1))] = data.draw(U8)
    try:
        read = decode_untrusted(kind, bytes(changed))
    except WireError:
        return
    again_kind, again = encode(read)
    assert decode_untrusted(again_kind, again) == read or read != read  # NaN differs from itself
    if kind is not Kind.CONTROL:
        assert again == bytes(changed)
