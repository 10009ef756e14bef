"""Turn the C declarations into `_aeron.py`: cffi's out-of-line ABI mode, no compiler involved.

setup.py runs this at installation; in a checkout ``python native/build_aeron.py`` writes the
module in place.
"""

from __future__ import annotations

from pathlib import Path

import cffi

HERE = Path(__file__).resolve().parent
MODULE = "sparkstrom.transport.aeron._aeron"

ffi = cffi.FFI()
ffi.cdef((HERE / "aeron.cdef.h").read_text())
ffi.set_source(MODULE, None)


def emit() -> Path:
    """Write the module beside its package in this checkout and return where."""
    target = HERE.parent.joinpath(*MODULE.split(".")).with_suffix(".py")
    ffi.emit_python_code(str(target))
    return target


if __name__ == "__main__":
    print(emit())
