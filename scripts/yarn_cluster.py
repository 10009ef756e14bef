"""`scripts/yarn-cluster start|show|stop`: a YARN with two hosts on this machine, for trials."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from pathlib import Path

from scripts.mini_yarn import Cluster, is_running, start, stop
from scripts.yarn_jars import PYSPARK, jar_directory, whole

HOME = Path(tempfile.gettempdir()) / f"sparkstrom-yarn-{os.getuid()}"


def main(arguments: list[str]) -> int:
    """Start, stop or show the cluster; return 0 if that succeeded."""
    parser = argparse.ArgumentParser(prog="scripts/yarn-cluster", description=__doc__)
    parser.add_argument("what", choices=["start", "stop", "show"])
    parser.add_argument(
        "--home", type=Path, default=HOME, help="where it lives (default: %(default)s)"
    )
    parser.add_argument("--nodes", type=int, default=2, help="NodeManagers (default: 2)")
    args = parser.parse_args(arguments)
    home = whole(args.home, os.environ)
    try:
        if args.what == "stop":
            ran = is_running(home)
            stop(home)
            stopped = f"stopped what ran in {home}; its logs stay there until the next start"
            print(stopped if ran else f"nothing ran in {home}")
            return 0
        if args.what == "start":
            start(home, jar_directory(os.environ), args.nodes)
        elif not is_running(home):
            raise RuntimeError(f"nothing runs in {home}: scripts/yarn-cluster start")
    except RuntimeError as error:
        print(f"scripts/yarn-cluster: {error}", file=sys.stderr)
        return 1
    print(how_to_use(Cluster(home)))
    return 0


def how_to_use(cluster: Cluster) -> str:
    """Return lines for a shell with which programs can be submitted to the cluster."""
    variables = cluster.variables().items()
    exports = "\n".join(f"export {key}={shlex.quote(value)}" for key, value in variables)
    submit = f"{shlex.quote(str(PYSPARK / 'bin/spark-submit'))} --master yarn --deploy-mode"
    return f"""\
# A ResourceManager and its NodeManagers run in {cluster.home}. In a shell:
unset SPARK_HOME
{exports}
{submit} cluster examples/digits.py
{submit} client examples/digits.py
# What drivers (in cluster mode) and executors print:
ls {shlex.quote(str(cluster.home))}/nm*/logs/application_*/container_*/std*
# At the end: scripts/yarn-cluster stop"""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
