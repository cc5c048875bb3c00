"""For fetching: a server on this machine that misbehaves on demand, and small archives."""

import hashlib
import http.server
import io
import tarfile
import threading
import zipfile

import pytest


class Server:
    """Serves bodies by path; `plan` says for each request in turn how it goes wrong."""

    def __init__(self, bodies):
        self.bodies, self.plan, self.ranges, self.asked = bodies, [], [], []
        self.honours_range = True
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                outer.answer(self)

            def log_message(self, *_):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def url(self, name):
        return f"http://127.0.0.1:{self.http.server_port}/{name}"

    def answer(self, request):
        asked = request.headers.get("Range")
        self.ranges.append(asked)
        self.asked.append(request.path.lstrip("/"))
        fault = self.plan.pop(0) if self.plan else None
        body = self.bodies.get(request.path.lstrip("/"))
        if isinstance(fault, int) or body is None:
            return request.send_error(fault if isinstance(fault, int) else 404)
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        if not self.honours_range:
            start = 0
        elif start >= len(body):
            request.send_response(416)
            request.send_header("Content-Range", f"bytes */{len(body)}")
            return request.end_headers()
        rest = body[start:]
        request.send_response(206 if start else 200)
        if fault != "endless":
            request.send_header("Content-Length", str(len(rest)))
        if start:
            sent_from = start + 1 if fault == "other range" else start
            request.send_header("Content-Range", f"bytes {sent_from}-{len(body) - 1}/{len(body)}")
        request.end_headers()
        if fault == "endless":
            return self.send_on(request, rest)
        request.wfile.write(rest[: len(rest) // 2] if fault == "cut" else rest)
        return None

    def send_on(self, request, body):
        try:
            while True:
                request.wfile.write(body)
        except OSError:
            pass

    def close(self):
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def serve(monkeypatch):
    """A function that starts a server of {path: bytes}."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    started = []

    def start(bodies):
        started.append(Server(bodies))
        return started[-1]

    yield start
    for server in started:
        server.close()


def _md5(body):
    return hashlib.md5(body).hexdigest()


@pytest.fixture
def md5():
    return _md5


@pytest.fixture
def tar():
    """Write a tar file of (name, bytes or TarInfo)."""

    def write(path, members, mode="w:gz"):
        with tarfile.open(path, mode) as archive:
            for name, content in members:
                info = tarfile.TarInfo(name) if isinstance(content, bytes) else content
                info.name = name
                if isinstance(content, bytes):
                    info.size = len(content)
                archive.addfile(info, io.BytesIO(content) if isinstance(content, bytes) else None)
        return path

    return write


@pytest.fixture
def zipped():
    """Write a zip file of (name or ZipInfo, bytes)."""

    def write(path, members):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in members:
                archive.writestr(name, content)
        return path

    return write
