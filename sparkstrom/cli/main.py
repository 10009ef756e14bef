"""Run the ``sparkstrom`` command: parse its arguments and call the named sub-command.

Every other module of this package is a sub-command. It defines ``add_parser(subparsers)`` and
``run(args)``, which returns the exit code. All modules are imported even for ``--help``, so heavy
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

EXIT_USAGE_ERROR = 2  # also argparse's exit code for wrong arguments
STDOUT_DESCRIPTOR = 1
EXIT_INTERRUPTED = 130  # what shells report for a program that was killed by Ctrl-C
EXIT_BROKEN_PIPE = 141  # what shells report for a program that was killed by SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command and return its exit code.

    ``argv`` contains the arguments; None means ``sys.argv[1:]``. After a SparkstromError, its
    message is printed and the exit code is 2; after Ctrl-C, it is 130.
    """
    commands = _load_commands()
    args = _build_parser(commands).parse_args(argv)
    try:
        code = int(commands[args.command].run(args))
        if sys.stdout is not None:  # it is None if the program was started without one
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
    except KeyboardInterrupt:
        print(f"sparkstrom {args.command}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return code


def _is_stdout_closed() -> bool:
    """Return whether the reader of stdout has closed its end of the pipe, as `| head` does."""
    poll = select.poll()
    poll.register(STDOUT_DESCRIPTOR, 0)  # poll reports a closed pipe even without requested events
    return bool(poll.poll(0))


def _load_commands() -> dict[str, ModuleType]:
    """Import the modules of all sub-commands; return them by the sub-commands' names."""
    names = sorted(module.name for module in pkgutil.iter_modules(sparkstrom.cli.__path__))
    return {
        name.replace("_", "-"): importlib.import_module(f"sparkstrom.cli.{name}")
        for name in names
        if name != "main"
    }


def _build_parser(commands: dict[str, ModuleType]) -> argparse.ArgumentParser:
    """Return an argument parser for all sub-commands; --help hides those without a help text."""
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
