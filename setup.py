"""Names the cffi builder: Aeron's declarations become a Python module, without a compiler.

All metadata is in pyproject.toml. cffi's own ``cffi_modules`` keyword would do for
``pip install .``, but an editable install never reaches it: setuptools runs ``build_ext``, where
cffi hooks in, only for projects with C extensions.
"""

import os
import runpy

from setuptools import setup
from setuptools.command.build_py import build_py

BUILDER = os.path.join("native", "build_aeron.py")
GENERATED = os.path.join("sparkstrom", "transport", "aeron", "_aeron.py")


class BuildPy(build_py):
    """Copies the package, then writes the generated module: beside the sources when editable."""

    def run(self) -> None:
        super().run()
        target = os.curdir if self.editable_mode else self.build_lib
        runpy.run_path(BUILDER)["ffi"].compile(tmpdir=target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        generated = [] if self.editable_mode else [os.path.join(self.build_lib, GENERATED)]
        return [*super().get_outputs(include_bytecode), *generated]


setup(cmdclass={"build_py": BuildPy})
