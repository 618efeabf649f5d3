"""The hosts of `nox -s hosts`: namespaces that see each other and leave nothing behind."""

import os
import sys

import pytest

from ci.hosts import network, rehearsal

LISTEN = "import socket; s = socket.create_server(('10.77.0.1', 5000)); s.accept(); s.accept()"
CONNECT = "import socket; socket.create_connection(('10.77.0.1', 5000), 0.5)"


def namespaces():
    mine = f"apexh{os.getpid()}-"
    return [line for line in network.ip("netns", "list").splitlines() if line.startswith(mine)]


def test_hosts_that_reach_each_other_until_a_cable_is_pulled(tmp_path):
    if missing := network.what_is_missing():
        pytest.skip(missing)

    def connects(hosts):
        command = [sys.executable, "-c", CONNECT]
        started = hosts.start(2, command, dict(os.environ), str(tmp_path / "log"))
        return started.wait(30) == 0

    with network.Network(2) as hosts:
        assert len(namespaces()) == 3
        command = [sys.executable, "-c", LISTEN]
        server = hosts.start(1, command, dict(os.environ), str(tmp_path / "log"))
        assert any(connects(hosts) for _ in range(20))
        hosts.limit(1, "1gbit")
        shown = network.ip("netns", "exec", hosts.name(1), "tc", "qdisc", "show", "dev", "eth0")
        assert "tbf" in shown
        assert "rate 1Gbit" in shown
        with pytest.raises(RuntimeError, match=r"tc -n \S+ qdisc replace .*rate fast"):
            hosts.limit(1, "fast")
        hosts.unplug(1)
        assert not connects(hosts)
        assert server.poll() is None
    assert server.wait(10) < 0
    assert namespaces() == []


def test_a_network_that_cannot_be_made_leaves_nothing(monkeypatch):
    if missing := network.what_is_missing():
        pytest.skip(missing)
    monkeypatch.setattr(network, "HUB_ADDRESS", "10.77.0.999")
    with pytest.raises(RuntimeError, match=r"ip -n \S+ addr add 10\.77\.0\.999/24 dev eth0: "):
        network.Network(2).__enter__()
    assert namespaces() == []


def test_without_root_the_session_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(network.shutil, "which", lambda name: "ip")
    monkeypatch.setattr(network.os, "geteuid", lambda: 1000)
    assert network.what_is_missing() == (
        "making network namespaces needs root: sudo python3 -m nox -s hosts"
    )
    monkeypatch.setattr(network.shutil, "which", lambda name: None)
    assert "apt-get install iproute2" in network.what_is_missing()


def test_plan_of_a_history():
    ranks = [3, 3, 2, 2, 2, 3]
    history = [{"step": 10 * (i + 1), "ranks": n, "digest": ""} for i, n in enumerate(ranks)]
    assert rehearsal.plan_of(history) == ["3:20", "2:50", "3:60"]


def test_a_checkpoint_of_other_bits_is_found():
    history = [{"step": 10, "ranks": 3, "digest": "a"}, {"step": 20, "ranks": 3, "digest": "b"}]
    rehearsal.compare("same", history, list(history))
    with pytest.raises(RuntimeError, match=r"other: expected .*'c'.*, got .*'b'"):
        rehearsal.compare("other", history, [history[0], history[1] | {"digest": "c"}])
