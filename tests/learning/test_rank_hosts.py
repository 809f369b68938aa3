"""Where ranks meet, and what is told of one that ended."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import psutil
import pytest

from embodied_rl.errors import UserError
from embodied_rl.learning.rank_hosts import LocalRanks, interface_of, listen_on, listening_store, open_store


def test_a_store_on_one_address_is_found_by_the_others_alone_there() -> None:
    where, store = listening_store("127.0.0.1", 2, 60.0)
    other = open_store(where, 2, 60.0)
    store.set("from the first", "1")
    other.set("from the second", "2")
    assert (other.get("from the first"), store.get("from the second")) == (b"1", b"2")
    port = int(where.rpartition(":")[2])
    listening = [one.laddr.ip for one in psutil.Process().net_connections() if one.status == psutil.CONN_LISTEN and one.laddr.port == port]
    assert listening == ["127.0.0.1"], "and not on all addresses of the machine"
    again, _ = listening_store("127.0.0.1", 2, 60.0)
    assert again != where, "a free port each time"
    with pytest.raises(OSError, match="address"):
        listening_store("203.0.113.7", 2, 60.0)  # of a network that nobody has (RFC 5737)


def test_the_interface_of_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, parts in psutil.net_if_addrs().items():
        for part in parts:
            if part.family == socket.AF_INET and not part.address.startswith("127."):
                assert interface_of(part.address) == name
    loopback = interface_of("127.0.0.1")
    assert loopback is not None
    assert interface_of("127.0.0.9") == loopback, "all of these are this machine's"
    assert interface_of("203.0.113.7") is None
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "chosen by the user")
    listen_on("127.0.0.1")
    listen_on("203.0.113.7")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "chosen by the user"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    with pytest.raises(UserError, match=r"no network interface of .* has 203\.0\.113\.7.*--node-ip-address"):
        listen_on("203.0.113.7")
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    listen_on("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == loopback


def test_processes_of_this_machine_see_all_devices() -> None:
    given = LocalRanks()
    assert given.ended(0.0) is None
    assert given.device_index(3) == 3


def test_a_killed_rank_is_named_and_not_one_that_failed_for_it() -> None:
    ranks = LocalRanks()
    ranks.processes = [subprocess.Popen([sys.executable, "-S", "-c", end]) for end in ("exit(1)", "import os; os.kill(os.getpid(), 9)")]
    for process in ranks.processes:
        process.wait()
    assert str(ranks.ended(0.0)) == "Train worker of rank 2 ended with status -9."
