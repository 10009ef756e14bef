"""Fixtures with an S3 server from PyPI behind a TCP proxy, and with small or read-only mounts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.checkpoint.tcp_proxy import TcpProxy

SERVER = """
import threading
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print("port", server.get_host_and_port()[1], flush=True)
threading.Event().wait()
"""


@pytest.fixture(scope="module")
def s3_port() -> Iterator[int]:
    pytest.importorskip("moto")
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        assert server.stdout is not None
        found = re.match(r"port (\d+)", server.stdout.readline())
        assert found is not None
        yield int(found[1])
        server.kill()


@pytest.fixture
def s3(s3_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[TcpProxy]:
    """A TCP proxy of the S3 server, which has one empty bucket, named bucket."""
    door = TcpProxy(s3_port)
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{door.port}",
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    import s3fs

    files = s3fs.S3FileSystem(skip_instance_cache=True)
    if files.exists("bucket"):
        files.rm("bucket", recursive=True)
    files.mkdir("bucket")
    yield door
    door.close()


@pytest.fixture
def mount_tmpfs(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """A function that mounts a tmpfs with given options; it skips the test if mounting fails."""
    if os.geteuid() != 0:
        pytest.skip("mounting wants root")
    with ExitStack() as mounts:

        def mount(options: str) -> Path:
            path = tmp_path / "mount_tmpfs"
            path.mkdir(exist_ok=True)
            command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"mounting fails here: {done.stderr}")
            mounts.callback(subprocess.run, ["umount", str(path)], check=True)
            return path

        yield mount
