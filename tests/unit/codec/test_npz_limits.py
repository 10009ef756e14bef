"""Tests that untrusted npz archives are read only within the memory that their size permits."""

from __future__ import annotations

import io
import zipfile

import numpy as np
import pytest

from sparkstrom.base.errors import WireError
from sparkstrom.base.untrusted_files import check_npz, read_npz
from sparkstrom.codec.optimizer_state_codec import decode_state_untrusted


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_npz_with_bzip2_or_lzma_member_is_refused(method: int) -> None:
    """Archives with bzip2 or LZMA compression are refused: they could expand without limit."""
    bomb, array = io.BytesIO(), io.BytesIO()
    np.save(array, np.zeros(1 << 20, np.uint8))
    with zipfile.ZipFile(bomb, "w", method) as archive:
        archive.writestr("a.npy", array.getvalue())
    with pytest.raises(ValueError, match="other than deflate"):
        check_npz(bomb)
    with pytest.raises(WireError, match="other than deflate"):
        decode_state_untrusted(bomb.getvalue())


@pytest.mark.parametrize(
    ("descr", "shape"), [("<f4", (1 << 40,)), ("|V0", (-1,)), ("<f4", (-1, -1)), ("<f4", (-1, 0))]
)
def test_array_size_that_differs_from_member_size_is_refused(
    descr: str, shape: tuple[int, ...]
) -> None:
    """An array whose header claims a different size than its data is refused."""
    header, file = io.BytesIO(), io.BytesIO()
    said = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, said)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.npy", header.getvalue())
    with pytest.raises(ValueError, match="not as long"):
        check_npz(file)
    with pytest.raises(WireError, match="not as long"):
        decode_state_untrusted(file.getvalue())


def test_an_array_of_an_unknown_format_version_is_refused() -> None:
    file, array = io.BytesIO(), io.BytesIO()
    np.save(array, np.zeros(3))
    content = bytearray(array.getvalue())
    content[len(np.lib.format.MAGIC_PREFIX)] = 9
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.npy", bytes(content))
    with pytest.raises(WireError, match="unknown format version"):
        decode_state_untrusted(file.getvalue())


@pytest.mark.parametrize("compressed", [False, True])
def test_every_archive_of_savez_is_read_as_writable_arrays(compressed: bool) -> None:
    """All archives that ``np.savez`` writes are read, as writable arrays."""
    file = io.BytesIO()
    write = np.savez_compressed if compressed else np.savez
    arrays = {
        "a": np.arange(90_000.0).reshape(300, 300),
        "columns": np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
        "number": np.float32(2.5),
        "nothing": np.empty((0, 4), np.float32),
        "text": np.array("text"),
    }
    write(file, **arrays)
    check_npz(file)
    assert np.load(file)["a"].shape == (300, 300)
    read = read_npz(file)
    assert list(read) == list(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(read[name], array, strict=True)
        assert read[name].flags.writeable
    assert read["columns"].flags.f_contiguous


def test_array_with_wrong_crc_is_refused() -> None:
    file = io.BytesIO()
    np.savez(file, a=np.arange(1000))
    content = bytearray(file.getvalue())
    content[500] ^= 1
    with pytest.raises(zipfile.BadZipFile, match="CRC"):
        read_npz(io.BytesIO(content))
