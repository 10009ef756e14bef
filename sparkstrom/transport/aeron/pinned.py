"""Which build of Aeron sparkstrom is tested with: a wheel that carries client and media driver."""

from __future__ import annotations

PROJECT = "pyaeron"
VERSION = "0.1.0"
WHEEL = "pyaeron-0.1.0-cp312-cp312-manylinux_2_28_x86_64.whl"
WHEEL_SHA256 = "6889d44b2aa2b5e8b653c29123717855cf114edf037490b0679ab7a156d7ec77"
WHEEL_PYTHON = "3.12"  # its extension is loaded as a plain library, from any CPython
EXTENSION = "pyaeron/_pyaeron.cpython-312-x86_64-linux-gnu.so"
MACHINE = "x86_64"
PLATFORM = f"manylinux_2_28_{MACHINE}"

MAJOR = 1
MINOR_MIN = 51  # client error codes and several signatures changed there
