"""The command `sparkstrom fetch-aeron`: install Aeron's C library, in a fixed version."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command ``fetch-aeron`` with its arguments."""
    parser = subparsers.add_parser(
        "fetch-aeron",
        help="download the Aeron library into this environment (CPython 3.11)",
        description="Download the Aeron library in the pinned version, and check its hash.",
    )
    parser.add_argument(
        "--wheel", type=Path, help="take the library from this pyaeron wheel (default: download it)"
    )
    parser.add_argument(
        "--target", type=Path, help="file to write (default: where sparkstrom looks for it)"
    )


def run(args: argparse.Namespace) -> int:
    """Install the library and print its path; return 0. Raise SetupError on failure."""
    from sparkstrom.transport.aeron.library import fetch_library

    print(fetch_library(args.wheel, args.target))
    return 0
