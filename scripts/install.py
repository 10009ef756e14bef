"""Install packages into a Python environment: scripts/install.py PYTHON ARGUMENT...

The arguments are those of ``pip install``. uv does the work in a third of pip's time, with pip's
settings (indexes, certificates, constraints). pip does it if there is no uv, if uv fails, or if pip
has a setting that is not listed here.
"""

from __future__ import annotations

import ast
import math
import os
import shutil
import subprocess
import sys
import tempfile
from typing import Any

FLAGS = {  # pip's settings with one or more values, and uv's flags
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "constraint": "--constraint",
    "trusted-host": "--allow-insecure-host",
}
SECONDS = ("timeout", "default-timeout")
SWITCHES = ("no-index", "compile")
IGNORED = (  # settings that uv does not need as flags
    "break-system-packages", "cache-dir", "cert", "disable-pip-version-check", "no-cache-dir",
    "no-color", "no-input", "progress-bar", "quiet", "require-virtualenv", "retries",
    "root-user-action", "verbose",
)  # fmt: skip
PRECEDENCE = ("global", "install", ":env:")  # of pip's sections; the last one wins
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def main() -> int:
    """Install with uv, or else with pip; return the exit status."""
    python, *arguments = sys.argv[1:]
    settings = read_pip_settings()
    if settings.keys() <= {*FLAGS, *SECONDS, *SWITCHES, *IGNORED} and (uv := find_uv()):
        flags, variables = translate(settings)
        command = [uv, "pip", "install", "--quiet", "--python", python, *flags, *arguments]
        options: dict[str, Any] = {"stderr": subprocess.PIPE, "text": True, "check": False}
        done = subprocess.run(command, env=variables, **options)
        if done.returncode == 0:
            return 0
        with tempfile.NamedTemporaryFile("w", suffix=".log", delete=False) as log:
            log.write(done.stderr)
        print(f"uv failed (its messages are in {log.name}); pip installs instead", file=sys.stderr)
    return subprocess.call([*PIP, "--quiet", "--python", python, "install", *arguments])


def read_pip_settings() -> dict[str, str]:
    """Return pip's settings for ``pip install``, from its files and variables."""
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=False)
    lines = [line.partition("=") for line in listed.stdout.splitlines()]
    settings = {}
    for section in PRECEDENCE:
        for name, _, value in lines:
            of_section, _, setting = name.rpartition(".")
            if of_section == section:
                settings[setting] = str(ast.literal_eval(value))
    return settings


def translate(settings: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the flags and the environment with which uv has these settings of pip."""
    # pip compares the versions of all indexes; uv by itself stops at the first with the package.
    flags = ["--index-strategy", "unsafe-best-match"]
    for setting, flag in FLAGS.items():
        flags += [part for value in settings.get(setting, "").split() for part in (flag, value)]
    if is_on(settings.get("no-index", "no")):
        flags.append("--no-index")
    if is_on(settings.get("compile", "yes")):
        flags.append("--compile-bytecode")
    variables = dict(os.environ)
    for seconds in (settings[setting] for setting in SECONDS if setting in settings):
        variables.setdefault("UV_HTTP_TIMEOUT", str(math.ceil(float(seconds))))
    if "cert" in settings:
        variables.setdefault("SSL_CERT_FILE", settings["cert"])
    return flags, variables


def is_on(value: str) -> bool:
    """Return whether a switch among pip's settings is on."""
    return value.lower() not in ("", "0", "n", "no", "f", "false", "off")


def find_uv() -> str | None:
    """Return the path of uv, which is installed into this virtual environment if necessary."""
    beside = os.path.join(os.path.dirname(sys.executable), "uv")
    found = shutil.which("uv") or shutil.which(beside)
    if found or sys.prefix == sys.base_prefix:  # Python's own environment is left as it is
        return found
    options = ("--quiet", "--retries", "0", "--timeout", "15", "--only-binary", "uv")
    subprocess.call([*PIP, "install", *options, "uv>=0.5"], stderr=subprocess.DEVNULL)
    return shutil.which(beside)


if __name__ == "__main__":
    sys.exit(main())
