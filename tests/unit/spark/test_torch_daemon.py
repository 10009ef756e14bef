"""The daemon that forks workers with torch in them, started as an executor's JVM starts it."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from pathlib import Path


def test_it_listens_with_torch_loaded_and_ends_with_its_executor() -> None:
    daemon = subprocess.Popen(
        [sys.executable, "-m", "sparkstrom.spark.torch_daemon", "pyspark.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,
    )
    assert daemon.stdin is not None and daemon.stdout is not None
    try:
        (port,) = struct.unpack("!i", daemon.stdout.read(4))
        assert 0 < port < 2**16
        assert "libtorch" in Path(f"/proc/{daemon.pid}/maps").read_text()
        assert len(os.listdir(f"/proc/{daemon.pid}/task")) == 1  # a process with threads cannot fork
        daemon.stdin.close()
        daemon.wait(timeout=60)
    finally:
        if daemon.poll() is None:
            daemon.send_signal(signal.SIGKILL)
            daemon.wait()
        daemon.stdout.close()
