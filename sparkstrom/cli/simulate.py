"""The hidden sub-command `simulate`: another name of `python -m sparkstrom.simulation`.

The simulator is a tool for contributors, so ``--help`` does not list it; scripts may still call it.
"""

from __future__ import annotations

import argparse

from sparkstrom.simulation import command


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command; argparse does not list a sub-command without a help text."""
    parser = subparsers.add_parser("simulate", description=command.DESCRIPTION)
    command.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Simulate all seeds; return 1 if any violates an invariant, else 0."""
    return command.run(args)
