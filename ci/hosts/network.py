"""Network namespaces as hosts, on a network that nothing outside of it can see.

The bridge between the hosts has a namespace of its own, too: no interface, address or route of the
machine is touched, and deleting the namespaces deletes everything.
"""

import os
import shutil
import signal
import subprocess
from contextlib import suppress

SUBNET = "10.77.0"  # of these namespaces alone
HUB = 0  # the number of the bridge's namespace; it is no host
HUB_ADDRESS = f"{SUBNET}.254"


def what_is_missing() -> str | None:
    """Why no namespace can be made here, with what to do; None where one can."""
    if not shutil.which("ip"):
        return "the command `ip` was not found; on Debian and Ubuntu: apt-get install iproute2"
    if os.geteuid() != 0:
        return "making network namespaces needs root: sudo python3 -m nox -s hosts"
    probe = f"apexh{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True)
    if made.returncode:
        return f"`ip netns add` failed, as in a container without CAP_SYS_ADMIN: {made.stderr}"
    return None


def ip(*words: str) -> str:
    """Run ``ip`` and return its output; an error says what it wrote."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


class Network:
    """``with Network(3)``: hosts 1 to 3 and the hub, which has an address of its own."""

    def __init__(self, hosts: int) -> None:
        self.hosts = range(1, hosts + 1)

    def name(self, host: int) -> str:
        """Of a host's namespace."""
        return f"apexh{os.getpid()}-{host}"

    def address(self, host: int) -> str:
        """Of a host's only interface, eth0."""
        return HUB_ADDRESS if host == HUB else f"{SUBNET}.{host}"

    def __enter__(self) -> "Network":
        try:
            self._make()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _make(self) -> None:
        hub = self.name(HUB)
        for host in (HUB, *self.hosts):
            ip("netns", "add", self.name(host))
            ip("-n", self.name(host), "link", "set", "lo", "up")
        ip("-n", hub, "link", "add", "eth0", "type", "bridge")
        ip("-n", hub, "addr", "add", f"{HUB_ADDRESS}/24", "dev", "eth0")
        ip("-n", hub, "link", "set", "eth0", "up")
        for host in self.hosts:
            name, cable = self.name(host), f"port{host}"
            ends = ("type", "veth", "peer", "name", "eth0", "netns", name)
            ip("-n", hub, "link", "add", cable, *ends)
            ip("-n", hub, "link", "set", cable, "master", "eth0", "up")
            ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            self.plug(host)

    def plug(self, host: int) -> None:
        """Connect a host's cable."""
        ip("-n", self.name(host), "link", "set", "eth0", "up")

    def unplug(self, host: int) -> None:
        """Pull a host's cable: from now on nobody hears of it, no reset of a connection either."""
        ip("-n", self.name(host), "link", "set", "eth0", "down")

    def limit(self, host: int, rate: str) -> None:
        """Let a host send no more than ``rate``, as tc writes it: 1gbit."""
        shape = ["root", "tbf", "rate", rate, "burst", "1mb", "latency", "100ms"]
        line = ["tc", "-n", self.name(host), "qdisc", "replace", "dev", "eth0", *shape]
        done = subprocess.run(line, capture_output=True, text=True, timeout=30)
        if done.returncode:
            raise RuntimeError(f"{' '.join(line)}: {done.stderr.strip()}")

    def start(self, host: int, command: list[str], environment: dict[str, str], log: str):
        """Start a command on a host; its output is appended to ``log``."""
        inside = ["ip", "netns", "exec", self.name(host), *command]
        with open(log, "a") as file:
            return subprocess.Popen(
                inside, env=environment, stdout=file, stderr=file, start_new_session=True
            )

    def kill(self, host: int) -> None:
        """End every process of a host at once."""
        while pids := ip("netns", "pids", self.name(host)).split():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    def remove(self) -> None:
        """End all processes of all hosts, and delete the namespaces that exist."""
        existing = {line.split()[0] for line in ip("netns", "list").splitlines() if line.strip()}
        for host in (*self.hosts, HUB):
            if self.name(host) in existing:
                self.kill(host)
                ip("netns", "del", self.name(host))
