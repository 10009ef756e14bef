"""Tests of checkpoint files: what is read equals what was written, and damage raises an error."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from numpy.typing import NDArray

from sparkstrom.base.errors import CheckpointDamaged, UsageError
from sparkstrom.checkpoint import files as checkpoint_file
from sparkstrom.checkpoint.files import (
    CHUNK_BYTES,
    DIGEST_CHARS,
    DIGEST_MARK,
    Checkpoint,
    read_untrusted_checkpoint,
    verify_digest,
    write_checkpoint,
)

SMALL = Checkpoint(
    {"epoch": 3, "positions": {"0": 17}},
    {"theta": np.arange(5, dtype=np.float32), "updater/0": np.zeros((), np.int64)},
)


def write_to_bytes(checkpoint: Checkpoint) -> bytes:
    file = io.BytesIO()
    write_checkpoint(checkpoint, file)
    return file.getvalue()


def read_from_bytes(content: bytes) -> Checkpoint:
    return read_untrusted_checkpoint(io.BytesIO(content), "x.npz")


def with_valid_digest(content: bytes) -> bytes:
    """Return the content with the correct digest for it, as a forger could compute it."""
    return content[:-DIGEST_CHARS] + hashlib.sha256(content[:-DIGEST_CHARS]).hexdigest().encode()


def test_arrays_larger_than_chunk_are_read_as_written() -> None:
    """Arrays larger than a chunk, and views of them, are read as written."""
    numbers = np.arange(CHUNK_BYTES // 2 + 7, dtype=np.int64)
    found = read_from_bytes(write_to_bytes(Checkpoint({}, {"a": numbers, "b": numbers[::-3]})))
    np.testing.assert_array_equal(found.arrays["a"], numbers)
    np.testing.assert_array_equal(found.arrays["b"], numbers[::-3])


@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8),
        arrays_of.arrays(
            st.one_of(
                arrays_of.boolean_dtypes(),
                arrays_of.integer_dtypes(endianness="?"),
                arrays_of.floating_dtypes(endianness="?"),
                arrays_of.byte_string_dtypes(),
            ),
            arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
        ),
        max_size=3,
    ),
    st.sampled_from(["as it is", "turned", "every second"]),
)
def test_arrays_of_any_type_and_layout_round_trip(
    arrays: dict[str, NDArray[Any]], lying: str
) -> None:
    """Arrays of any type and memory layout are read as written, by us and by ``np.load``."""
    views = {"as it is": np.asarray, "turned": np.transpose, "every second": lambda a: a[..., ::2]}
    given = {name: views[lying](array) if array.ndim else array for name, array in arrays.items()}
    content = write_to_bytes(Checkpoint({"name": "ä"}, given))
    found = read_from_bytes(content)
    assert found.description == {"name": "ä"}
    assert list(found.arrays) == list(given)
    with np.load(io.BytesIO(content), allow_pickle=False) as plain:
        assert json.loads(plain["description.json"])["description"] == {"name": "ä"}
        for name, array in given.items():
            for back in (found.arrays[name], plain[name]):
                assert (back.dtype, back.shape) == (array.dtype, array.shape)
                assert back.tobytes() == array.tobytes()


def test_equal_checkpoints_give_equal_files() -> None:
    assert write_to_bytes(SMALL) == write_to_bytes(SMALL)


def test_file_truncated_at_any_byte_is_damaged() -> None:
    """A file that was cut at any byte raises ``CheckpointDamaged``."""
    content = write_to_bytes(SMALL)
    for size in range(len(content)):
        with pytest.raises(CheckpointDamaged, match=r"^x.npz is damaged: its end is missing"):
            read_from_bytes(content[:size])


def test_file_with_additional_byte_is_damaged() -> None:
    """An additional byte at the end raises ``CheckpointDamaged``."""
    with pytest.raises(CheckpointDamaged):
        read_from_bytes(write_to_bytes(SMALL) + b"\0")


@given(st.sets(st.integers(0, 8 * len(write_to_bytes(SMALL)) - 1), min_size=1, max_size=3))
def test_file_with_flipped_bits_is_damaged(flipped: set[int]) -> None:
    content = bytearray(write_to_bytes(SMALL))
    for bit in flipped:
        content[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CheckpointDamaged):
        read_from_bytes(bytes(content))
    with pytest.raises(CheckpointDamaged):
        verify_digest(io.BytesIO(content), "x.npz")


@given(st.data())
def test_changed_bytes_with_valid_digest_raise_only_known_errors(data: st.DataObject) -> None:
    """Changed bytes under a correct digest give a checkpoint or a known error, nothing else."""
    content = bytearray(write_to_bytes(SMALL))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - len(DIGEST_MARK) - DIGEST_CHARS - 1))
        content[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CheckpointDamaged, UsageError):  # UsageError: another format number
        assert isinstance(read_from_bytes(with_valid_digest(bytes(content))), Checkpoint)


def npy(dtype: str, shape: str) -> bytes:
    """Return the header of an npy file with this type and shape."""
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}"
    return b"\x93NUMPY\x01\x00v\x00" + header.ljust(117).encode() + b"\n"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("description.json", b"[]"),
        ("description.json", b"{" * 100_000),
        ("theta.npy", b"no array"),
        ("theta.npy", npy("|O", "(1,)")),
        ("theta.npy", npy("<f8", "(10**15,)")),
        ("theta.npy", npy("<f8", "(999999999999,)")),
        ("theta.npy", npy("<f8", "(0, -1)")),
        ("theta.npy", npy("<f8", "('a',)")),
    ],
)
def test_foreign_zip_with_valid_digest_is_damaged(name: str, content: bytes) -> None:
    """A foreign zip file with a correct digest raises ``CheckpointDamaged``."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as npz:
        npz.writestr(name, content)
        if name != "description.json":
            about = {"format": 1, "sparkstrom": "0.1.0", "description": {}}
            npz.writestr("description.json", json.dumps(about))
        npz.comment = DIGEST_MARK + b"0" * DIGEST_CHARS
    with pytest.raises(CheckpointDamaged, match="it is not a checkpoint"):
        read_from_bytes(with_valid_digest(file.getvalue()))


def test_compressed_array_is_rejected_without_decompression() -> None:
    """A compressed array is refused without decompression."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as npz:
        about = {"format": 1, "sparkstrom": "0.1.0", "description": {}}
        npz.writestr("description.json", json.dumps(about))
        with npz.open("theta.npy", "w") as member:
            np.lib.format.write_array(member, np.zeros(1_000_000), allow_pickle=False)
        npz.comment = DIGEST_MARK + b"0" * DIGEST_CHARS
    with pytest.raises(CheckpointDamaged, match="it is not a checkpoint"):
        read_from_bytes(with_valid_digest(file.getvalue()))


def test_newer_format_raises_usage_error_with_both_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A checkpoint of a newer format raises ``UsageError`` with both versions."""
    with monkeypatch.context() as newer:
        newer.setattr(checkpoint_file, "FORMAT", 2)
        newer.setattr(checkpoint_file, "__version__", "9.1")
        content = write_to_bytes(SMALL)
    with pytest.raises(UsageError, match=r"x.npz has checkpoint format 2, written by sparkstrom 9"):
        read_from_bytes(content)


@pytest.mark.parametrize("turned", [False, True])
def test_writing_and_reading_need_memory_of_few_chunks(tmp_path: Path, turned: bool) -> None:
    """In addition to the arrays, writing and reading need memory for a few chunks."""
    numbers = np.ones((40, CHUNK_BYTES // 8))
    checkpoint = Checkpoint({}, {"a": numbers[:, ::2] if turned else numbers})
    tracemalloc.start()
    try:
        with (tmp_path / "c").open("wb") as out:
            write_checkpoint(checkpoint, out)
        written = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        with (tmp_path / "c").open("rb") as file:
            found = read_untrusted_checkpoint(file, "c")
        there = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert written < 4 * CHUNK_BYTES
    assert there < found.arrays["a"].nbytes + 4 * CHUNK_BYTES


def test_checkpoint_rejects_object_array_and_empty_name() -> None:
    """A checkpoint with an array of objects or an empty name cannot be created."""
    with pytest.raises(AssertionError, match="array a is of object"):
        Checkpoint({}, {"a": np.array([None])})
    with pytest.raises(AssertionError, match="without a name"):
        Checkpoint({}, {"": np.zeros(1)})
