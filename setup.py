"""Build steps and metadata that pyproject.toml cannot express.

- cffi turns Aeron's declarations into a Python module, without a compiler. cffi's own
  ``cffi_modules`` keyword would do for ``pip install .``, but an editable install never reaches it:
  setuptools runs ``build_ext``, where cffi hooks in, only for projects with C extensions.
- The wheel's tag says Linux on x86_64: the code is Python, but it needs the Aeron library.
- The description is README.md with absolute links, because PyPI shows it without the repository.
"""

import os
import re
import runpy
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
BUILDER = os.path.join("native", "build_aeron.py")
GENERATED = os.path.join("sparkstrom", "transport", "aeron", "_aeron.py")
PLATFORM = "manylinux_2_28_x86_64"  # as the wheel of pyaeron
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
REPOSITORY = SETTINGS["tool"]["sparkstrom"]["repository"]
RELATIVE_LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s]+)\)")


class BuildPy(build_py):
    """Copies the package, then writes the generated module: beside the sources when editable."""

    def run(self) -> None:
        """Build the package and the module."""
        super().run()
        target = os.curdir if self.editable_mode else self.build_lib
        runpy.run_path(BUILDER)["ffi"].compile(tmpdir=target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Return the paths of all files that ``run`` writes."""
        generated = [] if self.editable_mode else [os.path.join(self.build_lib, GENERATED)]
        return [*super().get_outputs(include_bytecode), *generated]


class BuildWheel(bdist_wheel):
    """Names the platform in the wheel's tag."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tag: any Python 3, no ABI, this platform."""
        return "py3", "none", PLATFORM


def description(repository: str) -> str:
    """Return README.md, with links into the repository if its address is known."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return RELATIVE_LINK.sub(rf"]({repository}/blob/main/\1)", text) if repository else text


def project_urls(repository: str) -> dict[str, str]:
    """Return the project URLs of a repository; none if its address is not known."""
    pages = {"Repository": "", "Documentation": "/tree/main/docs", "Issues": "/issues"}
    pages["Changelog"] = "/blob/main/CHANGELOG.md"
    return {name: repository + path for name, path in pages.items()} if repository else {}


setup(
    cmdclass={"build_py": BuildPy, "bdist_wheel": BuildWheel},
    long_description=description(REPOSITORY),
    long_description_content_type="text/markdown",
    project_urls=project_urls(REPOSITORY),
)
