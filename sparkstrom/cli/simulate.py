"""The hidden sub-command `simulate`: another name for `python -m sparkstrom.simulation`.

The simulator is a tool for contributors, so ``--help`` does not list this sub-command.
"""

from __future__ import annotations

import argparse

from sparkstrom.simulation import command


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command ``simulate`` without a help text, so that argparse does not list it."""
    parser = subparsers.add_parser("simulate", description=command.DESCRIPTION)
    command.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Simulate a fit with each seed; return 1 if any violates an invariant, else 0."""
    return command.run(args)
