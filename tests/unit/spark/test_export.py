"""Where exported rows are, by the addresses that Spark, Hadoop and people write."""

from __future__ import annotations

import pytest

from sparkstrom.base.errors import SetupError
from sparkstrom.spark.data.export import open_filesystem

fs = pytest.importorskip("pyarrow.fs")


@pytest.mark.parametrize("url", ["/a/b", "file:/a/b", "file:///a/b"])
def test_local_directories_need_no_package_but_pyarrow(url: str) -> None:
    filesystem, path = open_filesystem(url)
    assert isinstance(filesystem, fs.LocalFileSystem)
    assert path == "/a/b"


def test_what_nobody_opens_is_an_error_of_ours() -> None:
    pytest.importorskip("fsspec")
    with pytest.raises(SetupError, match="cannot open bogus://x/y: Protocol not known: bogus"):
        open_filesystem("bogus://x/y")
