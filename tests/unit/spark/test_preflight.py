"""Tests of checking the driver's machine before a fit: what is refused, and what it starts."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest

from sparkstrom.base.errors import SetupError
from sparkstrom.options.network import VoidConfiguration
from sparkstrom.transport.aeron import channel_settings as sizes
from sparkstrom.transport.aeron import media_driver as driver
from sparkstrom.worker.network_setup import check_driver_machine

VOID = VoidConfiguration()


def test_check_of_healthy_machine_takes_below_20_ms(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that finds nothing starts no process and no thread, so it takes little time."""
    started = Mock()
    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.setattr(threading.Thread, "start", started)
    check_driver_machine(VOID, 4, "127.0.0.1")
    started.assert_not_called()


def test_rejects_missing_aeron_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARKSTROM_AERON_LIBRARY", "/nowhere/libaeron.so")
    with pytest.raises(SetupError, match=r"^on .*/nowhere/libaeron\.so cannot be loaded"):
        check_driver_machine(VOID, 4, "127.0.0.1")


def test_rejects_network_mask_without_interface() -> None:
    with pytest.raises(SetupError, match=r"203\.0\.113\.0/24 matches no address"):
        check_driver_machine(VoidConfiguration(network_mask="203.0.113.0/24"), 4, "127.0.0.1")


def test_rejects_too_little_free_space_for_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too little free space for the streams of four neighbours is refused."""
    few = sizes.LogDirectory(tmp_path, 1000)
    monkeypatch.setattr(driver, "measure_log_directory", lambda root: few)
    with pytest.raises(SetupError, match=r"4 neighbours need .* has 1,000 bytes free"):
        check_driver_machine(VOID, 4, "127.0.0.1", tmp_path, tmp_path)
