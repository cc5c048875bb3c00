"""The nginx of the examples, run as it is but for its addresses, before a server that listens."""

import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path

import pytest

from harmonium.sites.folder import Federation, init

EXAMPLE = Path(__file__).parents[2] / "examples" / "deployment" / "nginx.conf"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")

HIDDEN = (
    "/",
    "/docs",
    "/openapi.json",
    "/v1",
    "/v1/fleet",
    "/v1/fleet/",
    "/v1/fleets/pull-messages",
    "/v1/control/start-run",
    "/v1/runtime/push-task-output",
    "//v1/control/start-run",
    "//v1/fleet/pull-messages",
    "/v1//fleet/pull-messages",
    "/v1/fleet//pull-messages",
    "/v1/fleet/pull-messages/",
    "/v1/fleet/pull-messages/../../control/start-run",
    "/v1/fleet/../control/start-run",
    "/v1/fleet/./pull-messages",
    "/v1/fleet/%2e%2e/control/start-run",
    "/v1/fleet/..%2fcontrol/start-run",
    "/v1/fleet/..%2f..%2fv1/control/start-run",
    "/v1/fleet/%252e%252e/control/start-run",
    "/v1/fleet/..\\control\\start-run",
    "/v1/fleet/..;/control/start-run",
    "/v1/control/../fleet/pull-messages",
    "/v1/control/%2e%2e/fleet/pull-messages",
    "/v1/control/start-run?x=/v1/fleet/pull-messages",
    "/v1/control/start-run#/v1/fleet/pull-messages",
    "/v1/fleet/pull-messages?next=/v1/control/start-run",
    "/v1/fleet/pull-messages%00",
    "/v1/fleet/pull%2dmessages",
    "/v1/%66leet/pull-messages",
    "/V1/FLEET/PULL-MESSAGES",
    "/v1/Control/start-run",
    "http://localhost/v1/control/start-run",
    "http://localhost/v1/fleet/../control/start-run",
    "https://127.0.0.1:8000/v1/control/start-run",
    "http://localhost//v1/control/start-run",
)


@dataclass
class Door:
    """nginx, and what came through it."""

    federation: Federation
    port: int
    came: list[tuple[str, str, dict[str, str], bytes]]

    def ask(self, raw: bytes, *, reads: int | None = None) -> bytes:
        context = ssl.create_default_context(cafile=str(self.federation.authority))
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        with plain, context.wrap_socket(plain, server_hostname="fl.example.org") as secure:
            secure.sendall(raw)
            return b"".join(islice(iter(lambda: secure.recv(1 << 16), b""), reads))

    def status(self, path: str, method: str = "POST", body: bytes = b"", more: str = "") -> int:
        head = f"{method} {path} HTTP/1.1\r\nHost: fl.example.org\r\nConnection: close\r\n{more}"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        return int(self.ask(head.encode() + body).split(b" ", 2)[1])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as held:
        return int(held.getsockname()[1])


def backend(
    federation: Federation, came: list[tuple[str, str, dict[str, str], bytes]]
) -> ThreadingHTTPServer:
    """A server over TLS that answers everything and remembers it."""

    class Everything(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one_request(self) -> None:
            self.raw_requestline = self.rfile.readline(65537)
            if not self.raw_requestline or not self.parse_request():
                self.close_connection = True
                return
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            came.append((self.command, self.path, headers, body))
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Everything)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(federation.certificate, federation.certificate_key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def replace(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, f"{old} stands {text.count(old)} times in the example"
    return text.replace(old, new)


def configure(folder: Path, federation: Federation, port: int, superlink: int) -> Path:
    """The example with other addresses and paths; nothing else is changed."""
    text = EXAMPLE.read_text(encoding="utf-8")
    text = replace(text, "user www-data;", "")
    text = replace(text, "pid /run/nginx.pid;", f"pid {folder}/nginx.pid;\ndaemon off;")
    text = replace(text, "/var/log/nginx/error.log", f"{folder}/error.log")
    text = replace(text, "server 127.0.0.1:8000;", f"server 127.0.0.1:{superlink};")
    text = replace(text, "listen 8443 ", f"listen 127.0.0.1:{port} ")
    for name in ("server/server.crt", "server/server.key", "ca/ca.crt"):
        text = replace(text, f" /srv/harmonium/federation/{name};", f" {federation.folder / name};")
    scratch = [
        f"{kind}_temp_path {folder}/{kind};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    ]
    text = replace(text, "http {\n", "http {\n" + "\n".join(scratch) + "\n")
    (folder / "nginx.conf").write_text(text, encoding="utf-8")
    return folder / "nginx.conf"


def serve(folder: Path, configuration: Path, port: int) -> subprocess.Popen[bytes]:
    command = [str(NGINX), "-p", str(folder), "-e", str(folder / "error.log"), "-c"]
    process = subprocess.Popen([*command, str(configuration)], stderr=subprocess.DEVNULL)
    for _ in range(200):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return process
        except OSError:
            assert process.poll() is None, (folder / "error.log").read_text()
            time.sleep(0.05)
    process.kill()
    raise AssertionError("nginx does not listen")


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    folder = tmp_path_factory.mktemp("nginx")
    federation = init(folder / "federation", [], ["fl.example.org"])
    came: list[tuple[str, str, dict[str, str], bytes]] = []
    server, port = backend(federation, came), free_port()
    process = serve(folder, configure(folder, federation, port, server.server_port), port)
    yield Door(federation, port, came)
    process.terminate()
    process.wait(10)
    server.shutdown()
    server.server_close()


def test_the_example_is_valid(tmp_path: Path) -> None:
    federation = init(tmp_path / "federation", [], ["fl.example.org"])
    path = configure(tmp_path, federation, free_port(), free_port())
    command = [str(NGINX), "-t", "-p", str(tmp_path), "-e", str(tmp_path / "error.log"), "-c"]
    done = subprocess.run([*command, str(path)], capture_output=True, text=True)
    assert done.returncode == 0 and "warn" not in done.stderr, done.stderr


def test_fleet_paths_pass_with_signed_headers_and_bodies_unchanged(door: Door) -> None:
    door.came.clear()
    signed = {"flwr-public-key": "QUJD+/==", "flwr-timestamp": "2026-11-16T10:00:00+00:00"}
    signed["flwr-signature"] = "c2ln" * 60
    lines = "".join(f"{name}: {value}\r\n" for name, value in signed.items())
    body = bytes(range(256)) * 24_000  # six million bytes, more than a chunk
    assert door.status("/v1/fleet/push-object", body=body, more=lines) == 200
    (method, path, headers, held), *rest = door.came
    assert (method, path, rest) == ("POST", "/v1/fleet/push-object", [])
    assert held == body and signed.items() <= headers.items()


@pytest.mark.parametrize("path", HIDDEN)
def test_nothing_else_reaches_the_server(door: Door, path: str) -> None:
    door.came.clear()
    for method in ("POST", "GET"):
        assert door.status(path, method) in (400, 403)
    assert door.came == []


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS", "CONNECT", "PATCH", "post"])
def test_no_other_method_passes(door: Door, method: str) -> None:
    door.came.clear()
    assert door.status("/v1/fleet/pull-messages", method) in (400, 403, 405)
    assert door.came == []


def test_headers_cannot_name_another_path(door: Door) -> None:
    door.came.clear()
    more = "X-Original-URL: /v1/control/start-run\r\nX-Rewrite-URL: /v1/control/start-run\r\n"
    assert door.status("/v1/fleet/pull-messages", more=more) == 200
    assert [path for _, path, _, _ in door.came] == ["/v1/fleet/pull-messages"]


def test_a_second_request_cannot_hide_in_the_first(door: Door) -> None:
    door.came.clear()
    end = b"Host: a\r\nConnection: close\r\n"
    hidden = b"POST /v1/control/start-run HTTP/1.1\r\n%sContent-Length: 0\r\n\r\n" % end
    head = b"POST /v1/fleet/pull-messages HTTP/1.1\r\n%s" % end
    both = b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    twice = b"Content-Length: 0\r\nContent-Length: %d\r\n\r\n" % len(hidden)
    for lengths in (both, twice, b"Transfer-Encoding: x, chunked\r\n\r\n0\r\n\r\n"):
        door.ask(head + lengths + hidden)
    first = head.replace(b"Connection: close\r\n", b"Content-Length: 0\r\n\r\n")
    answers = door.ask(first + hidden)
    assert answers.index(b"HTTP/1.1 200") < answers.index(b"HTTP/1.1 403")
    assert {path for _, path, _, _ in door.came} <= {"/v1/fleet/pull-messages"}


def test_bodies_have_a_limit(door: Door) -> None:
    door.came.clear()
    head = b"POST /v1/fleet/push-object HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
    answer = door.ask(head + b"Content-Length: %d\r\n\r\n" % (65 << 20), reads=1)
    assert b" 413 " in answer.splitlines()[0] and door.came == []


def test_plain_text_and_old_tls_are_refused(door: Door) -> None:
    door.came.clear()
    with socket.create_connection(("127.0.0.1", door.port), timeout=10) as plain:
        plain.sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b" 400 " in plain.recv(1 << 16).splitlines()[0]
    context = ssl.create_default_context(cafile=str(door.federation.authority))
    context.minimum_version = ssl.TLSVersion.TLSv1
    context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    with (
        socket.create_connection(("127.0.0.1", door.port), timeout=10) as plain,
        pytest.raises(ssl.SSLError),
    ):
        context.wrap_socket(plain, server_hostname="localhost")
    assert door.came == []


def test_another_server_behind_it_is_not_believed(tmp_path: Path) -> None:
    federation = init(tmp_path / "federation", [], ["fl.example.org"])
    came: list[tuple[str, str, dict[str, str], bytes]] = []
    impostor = backend(init(tmp_path / "other", [], ["fl.example.org"]), came)
    port = free_port()
    configuration = configure(tmp_path, federation, port, impostor.server_port)
    process = serve(tmp_path, configuration, port)
    try:
        assert Door(federation, port, came).status("/v1/fleet/pull-messages") == 502
        assert came == []
    finally:
        process.terminate()
        process.wait(10)
        impostor.shutdown()
        impostor.server_close()
