"""Who is let in, what passes the doors, and that no shipped code runs."""

import json
import shutil
import signal
import socket
import ssl
import sys
import time
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from harmonium.engines.flower import link as links
from harmonium.engines.flower.messenger import FlowerMessenger
from harmonium.engines.remote import SealedMessage
from harmonium.sites.folder import Federation

pytestmark = pytest.mark.deploy
NGINX = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin")
EXAMPLE = Path(__file__).parents[2] / "examples" / "deployment" / "nginx.conf"


@pytest.fixture
def waiting(stage):
    """A server that waits for its sites."""
    stage.init()
    server = stage.server("rounds=1")
    server.says("listening at")
    return server


def asked(stage, path: str, *, verify: object = False, body: bytes = b"") -> int:
    with httpx.Client(verify=verify) as client:
        kind = {"content-type": "application/protobuf"}
        url = f"https://127.0.0.1:{stage.port}{path}"
        return client.post(url, content=body, headers=kind).status_code


def test_strangers_are_refused(stage, waiting, tmp_path_factory, seen):
    """Wrong certificate, unknown key, plain text, control calls from outside: all refused."""
    other = type(stage)(tmp_path_factory.mktemp("other"))
    other.init("--port", str(stage.port))
    impostor = other.site("north")
    assert "does not present a certificate of this federation" in impostor.ends(2)

    # A kit of this federation whose key was never enrolled.
    stage.say("server", "add", "east")
    stranger = stage.site("east")
    stranger.says("the server does not admit this site")
    stranger.kill()

    # Plain text, by the command and by hand.
    plain = stage.site("west", "--insecure", "--server", f"127.0.0.1:{stage.port}")
    plain.says("cannot be reached")
    plain.kill()
    with socket.create_connection(("127.0.0.1", stage.port)) as raw:
        raw.sendall(
            b"POST /v1/fleet/pull-messages HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
        )
        raw.settimeout(10)
        assert not raw.recv(100).startswith(b"HTTP/1.1 2")

    # The open door has the fleet paths alone, and they want a signature.
    context = ssl.create_default_context(cafile=stage.folder / "federation" / "ca" / "ca.crt")
    for path in ("/v1/control/start-run", "/v1/control/list-nodes", "/v1/runtime/pull-messages"):
        assert asked(stage, path, verify=context) == 403
    assert asked(stage, "/v1/fleet/pull-messages", verify=context) in (401, 403)
    assert waiting.process.poll() is None and "takes part" not in waiting.text
    for site in stage.sites().values():
        site.says("connected")
    waiting.ends()
    seen("the server went on undisturbed and its own sites were let in")


def test_the_server_insists_on_tls_beyond_loopback(stage, seen):
    """--insecure with an address that others can reach."""
    stage.init()
    refused = stage.say("server", "start", "fedavg", "--insecure", "--listen", "0.0.0.0", code=2)
    assert "--insecure listens on loopback only" in refused
    data = ("--data", "digits", "--kit", "federation/kits/north")
    refused = stage.say("client", "start", *data, "--insecure", "--server", "10.0.0.1:1", code=2)
    assert "--insecure connects to loopback only" in refused
    seen("exit code 2 on either side")


def test_a_site_refuses_by_name(stage, seen):
    """One site's policy allows fewer epochs than the plan wants."""
    stage.init()
    policy = stage.folder / "federation" / "kits" / "west" / "policy.yaml"
    policy.write_text(policy.read_text().replace("epochs: none", "epochs: 1"))
    server, sites = stage.server("local.epochs=2", "rounds=1"), stage.sites()
    said = server.ends()
    words = "the site's policy refuses this plan: it has local.epochs=2, but `epochs` is 1"
    assert f"west does not take part: {words}" in said
    sites["west"].says(words)
    assert {line["client"] for line in stage.ledger()} == {0, 1}
    log = json.loads(stage.say("client", "log", "--kit", "federation/kits/west", "--json"))
    assert {entry["outcome"] for entry in log["entries"]} == {"refused"}
    assert log["totals"]["bytes"] == {}
    seen(f"west: {words}")


CANARY = """
import pathlib
pathlib.Path({canary!r}).write_text("it ran")
from flwr.clientapp import ClientApp
app = ClientApp()

@app.train()
def train(message, context):
    pathlib.Path({canary!r}).write_text("it ran")
    return message
"""


@pytest.mark.parametrize("whose", ["harmonium", "flower"])
def test_a_planted_app_does_not_run(whose, tmp_path, stage, free_port, monkeypatch, seen):
    """An app that writes a file is planted at the SuperLink, and its node is asked to run it."""
    canary, key = tmp_path / "canary", ec.generate_private_key(ec.SECP384R1())
    project = links.NO_CODE.replace(b"no_code_travels:here", b"planted.app:app")
    built = links.build_fab_from_files
    code = CANARY.format(canary=str(canary)).encode()
    files = {"pyproject.toml": project, "planted/__init__.py": b"", "planted/app.py": code}
    monkeypatch.setattr(links, "build_fab_from_files", lambda _: built(files))
    stage.init()
    federation = Federation.read(stage.folder / "federation")
    pair = (federation.certificate, federation.certificate_key)
    with links.Link(tmp_path / "link", "127.0.0.1", stage.port, pair) as link:
        number = link.admit({0: key.public_key()})[0]
        node = started(whose, stage, key, federation.authority, free_port())
        post = FlowerMessenger(link)
        while number not in post.online():
            assert node.process.poll() is None, node.text
            time.sleep(0.1)
        (ticket,) = post.push([SealedMessage(number, "train", b"{}", (b"",), 60.0)])
        answers, end = [], time.monotonic() + 60
        while not answers and time.monotonic() < end:
            answers = list(post.pull([ticket]))
            time.sleep(0.2)
        node.clear()
    assert canary.exists() == (whose == "flower"), "Flower's own node runs it; ours must not"
    if whose == "harmonium":
        assert "the seal of the ask cannot be read" in str(answers[0][1])
        seen("the node answers that it cannot read the ask")
    else:
        seen("Flower's own node does run it: the plant works")


def started(whose, stage, key, authority, port):
    """A node of either kind with this key; Flower's has a port of its own."""
    folder, address = stage.folder, f"localhost:{stage.port}"
    forms = serialization.PrivateFormat
    form = forms.OpenSSH if whose == "flower" else forms.PKCS8
    pem = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    (folder / "node.key").write_bytes(pem)
    if whose == "flower":
        command = [str(Path(sys.executable).parent / "flower-supernode"), "--superlink", address]
        command += ["--root-certificates", str(authority), "--port", str(port)]
        command += ["--auth-supernode-private-key", str(folder / "node.key")]
        return stage.command("flower", command)
    code = f"""
import sys, threading
from pathlib import Path
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from harmonium.engines.flower.node import answer_messages
from harmonium.sites.site import Identity, Site
key = serialization.load_pem_private_key(Path({str(folder / "node.key")!r}).read_bytes(), None)
server = ec.generate_private_key(ec.SECP384R1()).public_key()
site = Site(Identity("f", 0, key, server), Path({str(folder / "site")!r}), None)
answer_messages(site.answer, "{address}", key, Path({str(authority)!r}), print, threading.Event())
"""
    return stage.command("node", [sys.executable, "-c", code])


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
def test_nginx_stands_before_the_server(stage, tmp_path, free_port, seen):
    """The example's nginx in front: sites come through it, control calls do not."""
    inner = free_port()
    stage.init()
    federation = Federation.read(stage.folder / "federation")
    text = EXAMPLE.read_text()
    for old, new in {
        "user www-data;": "",
        "/run/nginx.pid": str(tmp_path / "nginx.pid"),
        "/var/log/nginx/error.log": str(tmp_path / "nginx.log"),
        "127.0.0.1:8000": f"127.0.0.1:{inner}",
        "/srv/harmonium/federation": str(federation.folder),
        "listen 8443": f"listen {stage.port}",
    }.items():
        assert old in text
        text = text.replace(old, new)
    conf = tmp_path / "nginx.conf"
    conf.write_text(text)
    server = stage.server(options=("--listen", f"127.0.0.1:{inner}"))
    server.says("listening at")
    front = stage.command("nginx", [str(NGINX), "-c", str(conf), "-g", "daemon off;"])
    context = ssl.create_default_context(cafile=federation.authority)
    time.sleep(1.0)
    assert asked(stage, "/v1/control/start-run", verify=context) == 403
    assert asked(stage, "/v1/runtime/pull-messages", verify=context) == 403
    stage.sites()
    server.ends()
    front.send(signal.SIGTERM)
    assert {line["outcome"] for line in stage.ledger()} == {"answered"}
    seen("three sites took part through it; control and runtime calls: 403")
