"""Install packages into a Python environment: scripts/install.py PYTHON ARGUMENT...

The arguments are those of ``pip install``. uv does the work in a quarter of pip's time, with pip's
settings (indexes, certificates, constraints); where there is no uv, or it fails, pip does it.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile

# pip's settings, and the variables by which uv reads the same. pip separates values by white space.
VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "constraint": "UV_CONSTRAINT",
    "trusted-host": "UV_INSECURE_HOST",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "timeout": "UV_HTTP_TIMEOUT",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
}
PRECEDENCE = ("global", "install", ":env:")  # of pip's sections, the last one wins
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def main() -> int:
    """Install with uv, or else with pip; return the exit status."""
    python, *arguments = sys.argv[1:]
    if (uv := find_uv()) and install_with_uv(uv, python, arguments):
        return 0
    return subprocess.call([*PIP, "--quiet", "--python", python, "install", *arguments])


def find_uv() -> str | None:
    """Return the path of uv, which is installed into this virtual environment if necessary."""
    beside = os.path.join(os.path.dirname(sys.executable), "uv")
    if sys.prefix != sys.base_prefix and not os.path.exists(beside):
        subprocess.call([*PIP, "--quiet", "install", "uv>=0.5"], stderr=subprocess.DEVNULL)
    return beside if os.path.exists(beside) else shutil.which("uv")


def install_with_uv(uv: str, python: str, arguments: list[str]) -> bool:
    """Return whether uv installed the packages; if not, its output is in a file, which is named."""
    command = [uv, "pip", "install", "--quiet", "--python", python, *arguments]
    if os.environ.get("PIP_COMPILE") != "0":  # as pip does
        command.append("--compile-bytecode")
    done = subprocess.run(command, env=uv_variables(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        with tempfile.NamedTemporaryFile("w", suffix=".log", delete=False) as log:
            log.write(done.stderr)
        print(f"uv cannot install this ({log.name}); pip does it", file=sys.stderr)
    return done.returncode == 0


def uv_variables() -> dict[str, str]:
    """Return the environment in which uv has pip's settings, as far as it does not have its own."""
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=False)
    settings: dict[str, str] = {}
    lines = [line.partition("=") for line in listed.stdout.splitlines()]
    for section in PRECEDENCE:
        for name, _, value in lines:
            of_section, _, setting = name.rpartition(".")
            if of_section == section and setting in VARIABLES:
                settings[VARIABLES[setting]] = " ".join(str(ast.literal_eval(value)).split())
    # As pip does, compare the versions of all indexes, not only those of the first.
    return {"UV_INDEX_STRATEGY": "unsafe-best-match", **settings, **os.environ}


if __name__ == "__main__":
    sys.exit(main())
