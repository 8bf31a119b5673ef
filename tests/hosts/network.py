"""Three hosts on one machine: network namespaces that are joined by a bridge."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

NETWORK = "10.87.53"
BRIDGE = f"bk{os.getpid() % 100_000}"


class Host:
    """A namespace with an address of its own; its files are those of the machine."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.name = f"{BRIDGE}h{number}"
        self.address = f"{NETWORK}.{number}"
        self.outer = f"{BRIDGE}v{number}"

    def start(self, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """Run a command there, in a process group of its own."""
        variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        with log.open("ab") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command],
                env={**os.environ, **variables},
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def cut_off(self) -> None:
        """Take its cable out: nobody is told."""
        run("ip", "link", "set", self.outer, "down")

    def plug_in(self) -> None:
        """Put it in again."""
        run("ip", "link", "set", self.outer, "up")


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def missing() -> str | None:
    """Why there can be no such hosts here."""
    if shutil.which("ip") is None:
        return "needs `ip` of Debian's iproute2"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    tried = subprocess.run(
        ["ip", "netns", "add", BRIDGE], capture_output=True, text=True, check=False
    )
    if tried.returncode:
        return f"cannot make network namespaces: {tried.stderr.strip()}"
    run("ip", "netns", "delete", BRIDGE)
    return None


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """So many hosts on one network, for the length of a block."""
    made = [Host(number) for number in range(1, count + 1)]
    try:
        run("ip", "link", "add", BRIDGE, "type", "bridge")
        run("ip", "link", "set", BRIDGE, "up")
        for host in made:
            inside = ("ip", "-n", host.name)
            run("ip", "netns", "add", host.name)
            run("ip", "link", "add", host.outer, "type", "veth", "peer", "eth0", "netns", host.name)
            run("ip", "link", "set", host.outer, "master", BRIDGE)
            run("ip", "link", "set", host.outer, "up")
            run(*inside, "address", "add", f"{host.address}/24", "dev", "eth0")
            run(*inside, "link", "set", "eth0", "up")
            run(*inside, "link", "set", "lo", "up")
        yield made
    finally:
        for host in made:
            for pid in pids(host):
                with suppress(ProcessLookupError):
                    os.kill(pid, 9)
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True, check=False)
            subprocess.run(["ip", "link", "delete", host.outer], capture_output=True, check=False)
        subprocess.run(["ip", "link", "delete", BRIDGE], capture_output=True, check=False)


def pids(host: Host) -> list[int]:
    """The processes of a host."""
    found = subprocess.run(
        ["ip", "netns", "pids", host.name], capture_output=True, text=True, check=False
    )
    return [int(pid) for pid in found.stdout.split()]
