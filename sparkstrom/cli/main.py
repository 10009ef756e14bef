"""The ``sparkstrom`` command: every other module of this package is a sub-command.

Such a module offers ``add_parser(subparsers)`` and ``run(args) -> int``, its exit code. It is
imported even for ``--help``, so heavy imports sit inside ``run``.
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

EXIT_REFUSED = 2  # argparse's own code for a wrong call
STDOUT = 1  # its descriptor
EXIT_UNREAD = 141  # what a shell shows of a program that SIGPIPE ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; return its exit code, or 2 with one message where sparkstrom refuses."""
    commands = _commands()
    args = _parser(commands).parse_args(argv)
    try:
        code = int(commands[args.command].run(args))
        sys.stdout.flush()
    except BrokenPipeError:
        if not _is_unread():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)  # or Python flushes again
        return EXIT_UNREAD
    except SparkstromError as error:
        print(f"sparkstrom {args.command}: {error}", file=sys.stderr)
        return EXIT_REFUSED
    return code


def _is_unread() -> bool:
    """Has whoever read what this program prints closed its end, as `| head` does?"""
    looked = select.poll()
    looked.register(STDOUT, 0)  # a closed end is told without being asked for
    return bool(looked.poll(0))


def _commands() -> dict[str, ModuleType]:
    names = sorted(module.name for module in pkgutil.iter_modules(sparkstrom.cli.__path__))
    return {
        name.replace("_", "-"): importlib.import_module(f"sparkstrom.cli.{name}")
        for name in names
        if name != "main"
    }


def _parser(commands: dict[str, ModuleType]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sparkstrom", description="Asynchronous training on Spark executors."
    )
    parser.add_argument("--version", action="version", version=f"sparkstrom {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in commands.values():
        module.add_parser(subparsers)
    return parser


if __name__ == "__main__":
    sys.exit(main())
