"""Tests of scripts/install.py: uv gets pip's settings, and pip is used where uv fails."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts import install

PIPS = """:env:.cert='/env/cert.pem'
:env:.default-timeout='15.5'
global.cert='/global/cert.pem'
global.extra-index-url='\\nhttps://one.example/simple\\nhttps://two.example/simple'
global.find-links='/global/wheels'
global.no-index='false'
global.progress-bar='off'
install.compile='no'
install.find-links='/install/wheels /more/wheels'
"""
TO_INSTALL = ["--editable", "."]


def test_pip_settings_are_translated_for_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = SimpleNamespace(stdout=PIPS)
    monkeypatch.setattr(subprocess, "run", lambda *command, **options: listed)
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.delenv("UV_HTTP_TIMEOUT", raising=False)
    flags, variables = install.translate(install.read_pip_settings())
    assert " ".join(flags) == (
        "--index-strategy unsafe-best-match"
        " --index https://one.example/simple --index https://two.example/simple"
        " --find-links /install/wheels --find-links /more/wheels"
    )
    assert (variables["SSL_CERT_FILE"], variables["UV_HTTP_TIMEOUT"]) == ("/env/cert.pem", "16")
    assert install.translate({"no-index": "1"})[0][-2:] == ["--no-index", "--compile-bytecode"]


class FakeInstallers:
    """A fake uv that records its arguments, and a record of calls of pip."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, uv_status: int) -> None:
        self.uv, self.pip, self._given = folder / "uv", list[Any](), folder / "given"
        self.uv.write_text(f'#!/bin/sh\necho "$@" >{self._given}\necho no >&2\nexit {uv_status}\n')
        self.uv.chmod(0o755)
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        monkeypatch.setattr(install, "find_uv", lambda: str(self.uv))
        monkeypatch.setattr(subprocess, "call", lambda command: self.pip.append(command) or 3)
        monkeypatch.setattr(sys, "argv", ["install.py", "/venv/bin/python", *TO_INSTALL])
        monkeypatch.setattr(install, "read_pip_settings", lambda: {"find-links": "/wheels"})

    @property
    def asked_of_uv(self) -> str:
        return self._given.read_text() if self._given.exists() else ""


PIP_CALL = [*install.PIP, "--quiet", "--python", "/venv/bin/python", "install", *TO_INSTALL]


def test_uv_installs_with_translated_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    programs = FakeInstallers(monkeypatch, tmp_path, 0)
    assert install.main() == 0
    assert programs.asked_of_uv.startswith("pip install --quiet --python /venv/bin/python ")
    assert programs.asked_of_uv.endswith("--find-links /wheels --compile-bytecode --editable .\n")
    assert programs.pip == []


def test_pip_installs_if_uv_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If uv fails, pip installs, and uv's messages are kept in a log file."""
    programs = FakeInstallers(monkeypatch, tmp_path, 1)
    assert install.main() == 3
    assert programs.pip == [PIP_CALL]
    (log,) = tmp_path.glob("*.log")
    assert log.read_text() == "no\n"
    assert f"uv failed (its messages are in {log}); pip installs" in capsys.readouterr().err


@pytest.mark.parametrize("setting", ["only-binary", "require-hashes"])
def test_pip_installs_if_setting_has_no_uv_equivalent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, setting: str
) -> None:
    """If pip has a setting without an equivalent in uv, pip installs and uv is not called."""
    programs = FakeInstallers(monkeypatch, tmp_path, 0)
    monkeypatch.setattr(install, "read_pip_settings", lambda: {setting: "1"})
    assert install.main() == 3
    assert (programs.asked_of_uv, programs.pip) == ("", [PIP_CALL])
