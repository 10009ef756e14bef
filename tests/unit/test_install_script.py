"""scripts/install.py: uv has pip's settings, and pip installs what uv does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts import install

PIPS = """:env:.cert='/env/cert.pem'
global.cert='/global/cert.pem'
global.extra-index-url='\\nhttps://one.example/simple\\nhttps://two.example/simple'
global.find-links='/global/wheels'
global.progress-bar='off'
install.find-links='/install/wheels'
"""


def test_uv_has_pips_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = SimpleNamespace(stdout=PIPS)
    monkeypatch.setattr(subprocess, "run", lambda *command, **options: listed)
    for name in install.VARIABLES.values():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("UV_HTTP_TIMEOUT", "7")
    found = install.uv_variables()
    assert {name: found.get(name) for name in sorted(set(install.VARIABLES.values()))} == {
        "ALL_PROXY": None,
        "SSL_CERT_FILE": "/env/cert.pem",
        "UV_CONSTRAINT": None,
        "UV_DEFAULT_INDEX": None,
        "UV_FIND_LINKS": "/install/wheels",
        "UV_HTTP_TIMEOUT": "7",
        "UV_INDEX": "https://one.example/simple https://two.example/simple",
        "UV_INSECURE_HOST": None,
        "UV_NO_INDEX": None,
    }


@pytest.mark.parametrize("uv", [None, "fails"])
def test_pip_installs_what_uv_does_not(
    uv: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if uv:
        uv = str(tmp_path / uv)
        Path(uv).write_text("#!/bin/sh\necho no such package >&2\nexit 1\n")
        Path(uv).chmod(0o755)
    called: list[Any] = []
    monkeypatch.setattr(install, "find_uv", lambda: uv)
    monkeypatch.setattr(subprocess, "call", lambda command: called.append(command) or 3)
    monkeypatch.setattr(sys, "argv", ["install.py", "/venv/bin/python", "--editable", "."])
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert install.main() == 3
    assert called == [
        [*install.PIP, "--quiet", "--python", "/venv/bin/python", "install", "--editable", "."]
    ]
    said = capsys.readouterr().err
    assert ("pip does it" in said) == (uv is not None)
