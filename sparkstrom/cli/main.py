"""The ``sparkstrom`` command, which runs the sub-command that its arguments name.

Every other module of this package is a sub-command. It defines ``add_parser(subparsers)`` and
``run(args)``, which returns the exit code. All of them are imported even for ``--help``, so heavy
imports belong inside ``run``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import select
import sys
from collections.abc import Sequence
from types import ModuleType

import sparkstrom.cli
from sparkstrom.base.errors import SparkstromError
from sparkstrom.base.version import __version__

EXIT_USAGE_ERROR = 2  # argparse's exit code for wrong arguments
STDOUT_DESCRIPTOR = 1
EXIT_BROKEN_PIPE = 141  # exit code of a program that SIGPIPE ended, as shells report it


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command and return its exit code.

    ``argv``: the arguments; None means ``sys.argv[1:]``. A SparkstromError is printed, and the exit
    code is 2.
    """
    commands = _load_commands()
    args = _build_parser(commands).parse_args(argv)
    try:
        code = int(commands[args.command].run(args))
        sys.stdout.flush()
    except BrokenPipeError:
        if not _is_stdout_closed():
            raise
        # Python flushes stdout again at exit, which would fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT_DESCRIPTOR)
        return EXIT_BROKEN_PIPE
    except SparkstromError as error:
        print(f"sparkstrom {args.command}: {error}", file=sys.stderr)
        return EXIT_USAGE_ERROR
    return code


def _is_stdout_closed() -> bool:
    """Return whether the reader of stdout has closed its end of the pipe, as `| head` does."""
    poll = select.poll()
    poll.register(STDOUT_DESCRIPTOR, 0)  # poll reports a closed pipe even without requested events
    return bool(poll.poll(0))


def _load_commands() -> dict[str, ModuleType]:
    """Import and return the modules of all sub-commands, by the commands' names."""
    names = sorted(module.name for module in pkgutil.iter_modules(sparkstrom.cli.__path__))
    return {
        name.replace("_", "-"): importlib.import_module(f"sparkstrom.cli.{name}")
        for name in names
        if name != "main"
    }


def _build_parser(commands: dict[str, ModuleType]) -> argparse.ArgumentParser:
    """Return an argument parser with all sub-commands; those without a help text are hidden."""
    parser = argparse.ArgumentParser(
        prog="sparkstrom", description="Train neural networks on the executors of a Spark cluster."
    )
    parser.add_argument("--version", action="version", version=f"sparkstrom {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in commands.values():
        module.add_parser(subparsers)
    return parser


if __name__ == "__main__":
    sys.exit(main())
