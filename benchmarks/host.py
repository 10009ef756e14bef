"""The process that keeps the namespaces of a host of ``benchmarks.hosts`` open, and cleans up.

It is the first process in new network, mount and UTS namespaces. It ends when its standard input is
closed, which the kernel does even if the benchmark is killed. Then it kills all other processes of
the host. With the last process, the kernel removes the interfaces, the queueing disciplines and
/dev/shm; the namespaces have no names that could be left behind.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path


def main() -> int:
    """Run ``host.py NAME HOSTS_FILE``; HOSTS_FILE is mounted as /etc/hosts."""
    name, hosts = sys.argv[1:]
    for command in (
        ["hostname", name],
        ["mount", "--bind", hosts, "/etc/hosts"],
        ["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"],  # for Aeron's media drivers
        ["ip", "link", "set", "lo", "up"],
    ):
        subprocess.run(command, check=True)
    for children in ("all", "default"):  # router solicitations would be counted
        switch = Path(f"/proc/sys/net/ipv6/conf/{children}/disable_ipv6")
        if switch.exists():
            switch.write_text("1")
    print("ready", flush=True)
    sys.stdin.read()
    while others := find_other_processes():
        for pid in others:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it has just ended
    shutil.rmtree(Path(hosts).parent, ignore_errors=True)  # all hosts try to remove the directory
    return 0


def find_other_processes() -> list[int]:
    """Return the pids of the other processes in this network namespace that have not ended."""
    here = os.stat("/proc/self/ns/net").st_ino
    return [pid for pid in find_pids(here) if pid != os.getpid()]


def find_pids(namespace: int) -> list[int]:
    """Return the pids of a network namespace, given by its inode; zombies are in no namespace."""
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
