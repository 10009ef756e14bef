"""One host of ``benchmarks.hosts``, from the inside: it holds namespaces open, and clears them.

Runs as the first process of new network, mount and UTS namespaces. It ends when its standard input
does, which the kernel sees to however the benchmark ends, and takes all processes of the host with
it; the interfaces, the queueing disciplines and /dev/shm go with the last of them. So there are no
names that could be left behind, and nothing to sweep.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path


def main() -> int:
    """``host.py NAME HOSTS_FILE``; HOSTS_FILE becomes /etc/hosts."""
    name, hosts = sys.argv[1:]
    for command in (
        ["hostname", name],
        ["mount", "--bind", hosts, "/etc/hosts"],
        ["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"],  # where Aeron's media drivers live
        ["ip", "link", "set", "lo", "up"],
    ):
        subprocess.run(command, check=True)
    for children in ("all", "default"):  # its router solicitations would be counted
        switch = Path(f"/proc/sys/net/ipv6/conf/{children}/disable_ipv6")
        if switch.exists():
            switch.write_text("1")
    print("ready", flush=True)
    sys.stdin.read()
    while others := processes_here():
        for pid in others:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it ended by itself
    shutil.rmtree(Path(hosts).parent, ignore_errors=True)  # the hosts' directory; others do, too
    return 0


def processes_here() -> list[int]:
    """All others in this network namespace that have not ended."""
    here = os.stat("/proc/self/ns/net").st_ino
    return [pid for pid in pids_in(here) if pid != os.getpid()]


def pids_in(namespace: int) -> list[int]:
    """Processes in the network namespace of that inode; zombies are in none."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                inode = os.stat(f"/proc/{entry.name}/ns/net").st_ino
            except OSError:  # it has just ended
                continue
            if inode == namespace:
                found.append(int(entry.name))
    return found


if __name__ == "__main__":
    sys.exit(main())
