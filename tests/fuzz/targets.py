"""Fuzz targets, one per decoder: for any bytes, nothing but WireError may be raised.

A target also checks the decoder's guarantees for accepted input. Its seeds are made by the
encoders, so that it needs no definition of validity of its own.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from sparkstrom.base.errors import WireError
from sparkstrom.codec import dl4j, wire
from sparkstrom.codec.messages import (
    Chunk,
    Commit,
    Control,
    MergedRange,
    OptimizerChunk,
    Payload,
    Update,
)
from sparkstrom.codec.payload import (
    decode_quanta_untrusted,
    decode_theta_untrusted,
    decode_update_untrusted,
    encode_quanta,
    encode_theta,
)
from sparkstrom.codec.sealed_frames import KEY_BYTES, Header, Reassembler, Seal, split_body
from sparkstrom.encoding.encoder import Encoder
from sparkstrom.encoding.forms import Form
from sparkstrom.encoding.grid import EXACT_QUANTA
from sparkstrom.encoding.layers import Layers
from sparkstrom.encoding.thresholds import FixedThreshold
from sparkstrom.encoding.update_sum import UpdateSum
from tests.unit.encoding.sums_bound import sum_bytes_bound

FENCED_BYTES = 16 * mmap.PAGESIZE
SEAL = Seal(bytes(range(KEY_BYTES)), 1)
MESSAGE_BYTES_MAX = 4096
K = 20
U16 = struct.Struct("<H")
ANNOUNCED = struct.Struct("<III")  # n_params, tau in quanta, count: fields of the messages' headers
SEALED = struct.Struct("<BIIIQII")  # kind, sender, receiver, edge, counter, piece, pieces


@dataclass(frozen=True, slots=True)
class Target:
    """A decoder to be fuzzed: ``run`` returns a description of the result, or raises."""

    seeds: Callable[[], list[bytes]]
    run: Callable[[bytes], str]


def make_fence() -> mmap.mmap:
    """Return memory that is followed by an inaccessible page."""
    memory = mmap.mmap(-1, FENCED_BYTES + mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    closed = ctypes.CDLL(None, use_errno=True).mprotect(
        ctypes.c_void_p(start + FENCED_BYTES), ctypes.c_size_t(mmap.PAGESIZE), 0
    )
    assert closed == 0, f"mprotect: errno {ctypes.get_errno()}"
    return memory


FENCE = make_fence()


def copy_to_fence(payload: bytes) -> memoryview:
    """Copy a payload to the fence: a kernel that reads one byte too many ends the process."""
    start = FENCED_BYTES - len(payload)
    FENCE[start:FENCED_BYTES] = payload
    return memoryview(FENCE)[start:FENCED_BYTES].toreadonly()


# -- frames: a run of pieces, each u16 length | u8 raw or sealed by us | data ----------------------


def frame_seeds() -> list[bytes]:
    bodies = [b"", b"x" * 40, bytes(100)]
    seeds, counter = [], 0
    for body, piece_bytes in zip(bodies, (8, 16, 100), strict=True):
        raw, sealed = b"", b""
        pieces = split_body(body, piece_bytes)
        for piece, part in enumerate(pieces):
            counter += 1
            header = Header(1, 7, 0, 1, counter, piece, len(pieces))
            raw += prefix_with_length(b"\0" + SEAL.close(header, part))
            fields = SEALED.pack(1, 7, 0, 1, counter, piece, len(pieces))
            sealed += prefix_with_length(b"\1" + fields + part)
        seeds += [raw, sealed]
    return seeds


def prefix_with_length(data: bytes) -> bytes:
    return U16.pack(len(data)) + data


def run_frames(data: bytes) -> str:
    joiner = Reassembler(MESSAGE_BYTES_MAX)
    outcome, refusals = [], []
    while len(data) >= U16.size:
        (size,) = U16.unpack_from(data)
        part, data = data[U16.size : U16.size + size], data[U16.size + size :]
        try:
            header, body = SEAL.open_untrusted(make_frame(part))
            whole = joiner.add_piece(header, body)
        except WireError as error:
            refusals.append(error)
            continue
        assert whole is None or len(whole) <= MESSAGE_BYTES_MAX
        outcome.append("part" if whole is None else "whole")
    if refusals:
        raise refusals[-1]
    return " ".join(outcome[:4])


def make_frame(part: bytes) -> bytes:
    """Return the part as a raw frame, or seal it, to fuzz what follows decryption."""
    if len(part) <= SEALED.size or part[0] % 2 == 0:
        return part[1:]
    fields = SEALED.unpack_from(part, 1)
    return SEAL.close(Header(*fields), part[1 + SEALED.size :])


# -- messages: u8 kind | body ----------------------------------------------------------------------


def message_seeds() -> list[bytes]:
    known = {"seq": 1, "payload": Payload(form=1, tau_quanta=4, count=1, data=b"\0\1")}
    update = Update(origin=1, seen=1, epoch=0, batch=3, steps=4, **known)
    committed = Commit(commit=9, origin=1, **known)
    chunk = Chunk(index=0, commit=3, payload=bytes(8))
    merged = MergedRange(after=3, commit=9, last=[(1, 2), (7, 4)], count=6, payload=bytes(8))
    updater = OptimizerChunk(asker=1, copy=2, index=0, count=3, payload=bytes(8))
    controls = [sample(msgspec.inspect.type_info(kind)) for kind in Control.__args__]
    data = (update, committed, chunk, merged, updater)
    encoded = [wire.encode(message) for message in (*data, *controls)]
    return [bytes([kind]) + body for kind, body in encoded]


def sample(kind: msgspec.inspect.Type) -> Any:
    """Return a valid value for a message's field."""
    info = msgspec.inspect
    match kind:
        case info.StructType():
            return kind.cls(**{field.name: sample(field.type) for field in kind.fields})
        case info.UnionType():
            return sample(next(one for one in kind.types if not isinstance(one, info.NoneType)))
        case info.ListType():
            return [sample(kind.item_type)]
        case info.TupleType():
            return tuple(sample(item) for item in kind.item_types)
        case info.DictType():
            return {sample(kind.key_type): sample(kind.value_type)}
        case info.EnumType():
            return next(iter(kind.cls))
        case info.BoolType():
            return True
    return {info.IntType: 3, info.FloatType: 1.5, info.StrType: "a name"}[type(kind)]


def run_messages(data: bytes) -> str:
    kind, body = data[0] if data else 0, data[1:]
    message = wire.decode_untrusted(kind, body)
    again = wire.encode(message)
    if wire.is_data(message):
        assert again == (kind, body)  # a data message has one form
    assert wire.encode(wire.decode_untrusted(*again)) == again
    return type(message).__name__


# -- payloads: the announced numbers, then the payload ---------------------------------------------


def update_seeds(forms: tuple[Form, ...], levels: int = 1) -> list[bytes]:
    """Return payloads of an encoder, sparse and dense, for several numbers of parameters."""
    seeds = []
    random = np.random.default_rng(1)
    for n_params in (1, 7, 64, 1000):
        for density in (0.01, 0.2, 0.9):
            encoder = Encoder(n_params, K, FixedThreshold(0.5, levels))
            for _ in range(2):  # bitmaps alternate between two forms
                moved = random.random(n_params) < density
                sizes = random.choice([-0.75, 0.75], n_params) * random.choice([1, 2, 9], n_params)
                local = np.where(moved, sizes, 0)
                made = encoder.publish(local.astype(np.float32), np.zeros(n_params, np.float32))
                if made and made.form in forms:
                    announced = ANNOUNCED.pack(n_params, made.tau_quanta, made.count)
                    seeds.append(bytes([made.form]) + announced + made.payload)
    return seeds


def run_update(data: bytes, forms: tuple[Form, ...]) -> str:
    if len(data) <= ANNOUNCED.size:
        raise WireError("too short for this target")
    form = forms[data[0] % len(forms)]
    n_params, tau_quanta, count = ANNOUNCED.unpack_from(data, 1)
    n_params &= 2**31 - 1
    payload = copy_to_fence(data[1 + ANNOUNCED.size :])
    indices, quanta = decode_update_untrusted(payload, form, count, tau_quanta, n_params)
    assert indices.size == quanta.size == count <= 4 * len(payload)
    assert indices[0] >= 0
    assert indices[-1] < n_params
    assert np.all(np.diff(indices) > 0)
    steps = [1, 2, 4, 8] if form is Form.LEVELS else [1, 0.5]
    assert np.isin(np.abs(quanta), tau_quanta * np.array(steps)).all()
    check_layers(payload, form, count, tau_quanta, indices, quanta, n_params)
    return f"{form.name} of {count.bit_length()} bits"


def check_layers(
    payload: Any, form: Form, count: int, tau_quanta: int, indices: Any, quanta: Any, n: int
) -> None:
    """Decode the payload also with layers, of which the second has three times tau."""
    layers = Layers((n // 2, n), (1, 3))
    if 3 * tau_quanta > EXACT_QUANTA // (8 if form is Form.LEVELS else 1):
        return
    same, scaled = decode_update_untrusted(payload, form, count, tau_quanta, n, layers)
    np.testing.assert_array_equal(same, indices)
    np.testing.assert_array_equal(scaled, quanta * np.where(indices < n // 2, 1, 3))


def run_gaps(data: bytes) -> str:
    return run_update(data, (Form.GAPS,))


def run_levels(data: bytes) -> str:
    return run_update(data, (Form.LEVELS,))


def run_bitmap(data: bytes) -> str:
    return run_update(data, (Form.BITMAP_UP, Form.BITMAP_DOWN))


def snapshot_seeds() -> list[bytes]:
    payloads = [encode_theta(np.arange(-n, n, dtype=np.float32) * 2.0**-10) for n in (1, 2, 9, 20)]
    return [U16.pack(len(payload) // 4) + payload for payload in payloads]


def run_snapshot(data: bytes) -> str:
    if len(data) < U16.size:
        raise WireError("too short for this target")
    (n_params,) = U16.unpack_from(data)
    payload = data[U16.size :]
    theta = decode_theta_untrusted(payload, n_params, K)
    assert encode_theta(theta) == payload
    assert np.isfinite(theta).all()
    assert not np.any((theta == 0) & np.signbit(theta))
    return f"{n_params.bit_length()} bits of parameters"


def sum_seeds() -> list[bytes]:
    """Return encoded sums: sparse and dense, with few and many entries, small and large steps."""
    random = np.random.default_rng(3)
    seeds = []
    for n_params in (1, 9, 300, 4000):
        for density, steps in ((0.01, [6]), (0.3, [640, 512, 1280]), (1.0, [1, 7, 2**30 + 1])):
            array = random.choice(steps, n_params) * random.choice([-1, 1], n_params)
            array[random.random(n_params) >= density] = 0
            made = encode_quanta(UpdateSum.of_array(array.astype(np.int32)))
            seeds.append(U16.pack(n_params) + made)
    return seeds


def run_sum(data: bytes) -> str:
    if len(data) < U16.size:
        raise WireError("too short for this target")
    (n_params,) = U16.unpack_from(data)
    total = decode_quanta_untrusted(copy_to_fence(data[U16.size :]), n_params)
    array = total.dense()
    assert array.shape == (n_params,)
    again = encode_quanta(total)
    assert len(again) <= sum_bytes_bound(total.hits[0].size, n_params)
    np.testing.assert_array_equal(decode_quanta_untrusted(again, n_params).dense(), array)
    return f"layout {data[U16.size]}, {int(np.count_nonzero(array)).bit_length()} bits of entries"


# -- DL4J's layouts: u16 values of the receiver | int32 words --------------------------------------


def dl4j_seeds(encode: Callable[[Any, float], Any]) -> list[bytes]:
    random = np.random.default_rng(2)
    seeds = []
    for n_values in (2, 15, 16, 33, 300):
        for tau in (0.3, 1.0, 1e-3):
            values = random.normal(0, 1, n_values).astype(np.float32)
            if (message := encode(values, tau)) is not None:
                seeds.append(U16.pack(n_values) + message.astype("<i4").tobytes())
    return seeds


def run_dl4j(data: bytes, decode: Callable[[Any, Any], None]) -> str:
    if len(data) < U16.size:
        raise WireError("too short for this target")
    (n_values,) = U16.unpack_from(data)
    body = data[U16.size :]
    words = np.frombuffer(body[: len(body) // 4 * 4], "<i4")
    out = np.zeros(n_values, np.float32)
    try:
        decode(words, out)
    except WireError:
        assert not out.any(), "a refused message has moved something"
        raise
    tau = words[2:3].view(np.float32)[0]
    assert np.isin(np.abs(out), np.array([0, tau, tau / 2], np.float32)).all()
    return f"{int(np.count_nonzero(out)).bit_length()} bits of hits"


TARGETS: dict[str, Target] = {
    "frames": Target(frame_seeds, run_frames),
    "messages": Target(message_seeds, run_messages),
    "gaps": Target(lambda: update_seeds((Form.GAPS,)), run_gaps),
    "bitmap": Target(lambda: update_seeds((Form.BITMAP_UP, Form.BITMAP_DOWN)), run_bitmap),
    "levels": Target(lambda: update_seeds((Form.LEVELS,), levels=4), run_levels),
    "sum": Target(sum_seeds, run_sum),
    "snapshot": Target(snapshot_seeds, run_snapshot),
    "dl4j-threshold": Target(
        lambda: dl4j_seeds(dl4j.encode_threshold),
        lambda data: run_dl4j(data, dl4j.decode_threshold),
    ),
    "dl4j-bitmap": Target(
        lambda: dl4j_seeds(dl4j.encode_bitmap), lambda data: run_dl4j(data, dl4j.decode_bitmap)
    ),
}
