"""Server and sites in network namespaces of their own, as on machines of their own."""

import os
import shutil
import subprocess

import pytest

IP = shutil.which("ip", path="/usr/sbin:/usr/bin:/sbin:/bin")
pytestmark = pytest.mark.deploy
SERVER = "10.77.0.1"


def ip(*words: str) -> None:
    subprocess.run([str(IP), *words], check=True, capture_output=True)


@pytest.fixture
def networks():
    """Namespaces on one bridge, which belongs to the server's."""
    if IP is None or os.geteuid() != 0:
        pytest.skip("needs ip and root")
    tag = f"hm{os.getpid() % 10000}"
    names = {name: f"{tag}-{name}" for name in ("server", "north", "south", "west")}
    try:
        try:
            ip("netns", "add", names["server"])
        except subprocess.CalledProcessError:
            pytest.skip("network namespaces are not allowed here")
        home = ("-n", names["server"])
        ip(*home, "link", "add", "bridge", "type", "bridge")
        ip(*home, "addr", "add", f"{SERVER}/24", "dev", "bridge")
        for device in ("lo", "bridge"):
            ip(*home, "link", "set", device, "up")
        for number, name in enumerate(("north", "south", "west"), 2):
            ip("netns", "add", names[name])
            there = ("-n", names[name])
            ip(
                *home,
                "link",
                "add",
                name,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                names[name],
            )
            ip(*home, "link", "set", name, "master", "bridge", "up")
            ip(*there, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip(*there, "link", "set", device, "up")
        yield names
    finally:
        for name in names.values():
            subprocess.run([str(IP), "netns", "del", name], capture_output=True)


def test_sites_on_networks_of_their_own(stage, networks, seen):
    """Server and three sites in four network namespaces; one cable is cut for a while."""
    stage.inside = {name: [str(IP), "netns", "exec", space] for name, space in networks.items()}
    stage.init("--host", SERVER)
    server, sites = stage.server("local.epochs=20", "engine.patience=150"), stage.sites()
    stage.until(1)
    cable = ("-n", networks["server"], "link", "set", "south")
    ip(*cable, "down")
    sites["south"].says("the connection broke", seconds=150)
    ip(*cable, "up")
    server.ends(seconds=400)
    assert {line["outcome"] for line in stage.ledger()} == {"answered"}
    seen("the site whose cable was cut came back and took part in every round")
