"""Archives from others are read within the memory that their size allows."""

from __future__ import annotations

import io
import zipfile

import numpy as np
import pytest

from sparkstrom.base.errors import WireError
from sparkstrom.base.safe_files import check_npz
from sparkstrom.codec.optimizer_state_codec import decode_state_untrusted


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_only_stored_and_deflated_members_are_read(method: int) -> None:
    bomb, array = io.BytesIO(), io.BytesIO()
    np.save(array, np.zeros(1 << 20, np.uint8))
    with zipfile.ZipFile(bomb, "w", method) as archive:
        archive.writestr("a.npy", array.getvalue())
    with pytest.raises(ValueError, match="other than deflate"):
        check_npz(bomb)
    with pytest.raises(WireError, match="other than deflate"):
        decode_state_untrusted(bomb.getvalue())


def test_an_array_that_declares_more_than_its_member_has_is_refused() -> None:
    header, file = io.BytesIO(), io.BytesIO()
    said = {"descr": "<f4", "fortran_order": False, "shape": (1 << 40,)}
    np.lib.format.write_array_header_1_0(header, said)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.npy", header.getvalue())
    with pytest.raises(ValueError, match="not as long"):
        check_npz(file)


@pytest.mark.parametrize("compressed", [False, True])
def test_what_numpy_writes_is_read(compressed: bool) -> None:
    file = io.BytesIO()
    write = np.savez_compressed if compressed else np.savez
    write(file, a=np.zeros((300, 300)), b=np.array("text"))
    check_npz(file)
    assert np.load(file)["a"].shape == (300, 300)
