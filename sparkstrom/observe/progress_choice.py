"""Progress choice: which way a fit shows itself, by what a person asks for and what is there."""

from __future__ import annotations

import importlib.util
import os
import sys

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import is_truth, shown
from sparkstrom.observe.progress import PlainLines, ProgressLine, is_terminal

WAYS = ("auto", "bar", "plain", "notebook")
NEEDED = {"bar": "tqdm", "notebook": "IPython"}


def check_progress(progress: bool | str) -> None:
    """Raise UsageError for a way that there is not, or whose package is missing."""
    if is_truth(progress):
        return
    if not isinstance(progress, str) or progress not in WAYS:
        known = ", ".join(map(repr, WAYS))
        raise UsageError(f"progress={shown(progress)}: must be True, False or one of {known}")
    package = NEEDED.get(progress)
    if package is not None and not _is_there(package):
        raise UsageError(
            f"progress={progress!r} needs the package {package} on the driver: "
            f"pip install {package.lower()}, or progress='plain'"
        )


def progress_for(progress: bool | str) -> ProgressLine:
    """What draws; ``progress`` as ``check_progress`` lets it pass."""
    if is_truth(progress) and not progress:
        return ProgressLine()
    way = progress if isinstance(progress, str) else "auto"
    if way == "auto":
        way = _usual_way()
    if way == "bar":
        from sparkstrom.observe.progress_bar import TerminalBar

        return TerminalBar()
    if way == "notebook":
        from sparkstrom.observe.progress_notebook import NotebookBar

        return NotebookBar()
    return PlainLines()


def _usual_way() -> str:
    """A notebook's kernel, a terminal that can move its cursor, or neither."""
    if is_notebook():
        return "notebook"
    can_draw = is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb"
    return "bar" if can_draw and _is_there(NEEDED["bar"]) else "plain"


def reads_descriptors(stream: object) -> bool:
    """Whether a notebook's stream also shows what other processes write to its descriptor."""
    return getattr(stream, "watch_fd_thread", None) is not None  # ipykernel's OutStream has it


def is_notebook() -> bool:
    """Does a kernel run this code? IPython at a terminal has none."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def _is_there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
