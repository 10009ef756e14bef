"""`sparkstrom fetch-aeron`: put the pinned Aeron library where sparkstrom looks for it."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the sub-command."""
    parser = subparsers.add_parser(
        "fetch-aeron", help="download the pinned, hash-checked Aeron library into this environment"
    )
    parser.add_argument("--wheel", type=Path, help="a pyaeron wheel that is already here")
    parser.add_argument(
        "--target", type=Path, help="the file to write (default: where it is found)"
    )


def run(args: argparse.Namespace) -> int:
    """Fetch, and print the place. SetupError says what to do where that fails."""
    from sparkstrom.transport.aeron.fetching import fetch

    print(fetch(args.wheel, args.target))
    return 0
