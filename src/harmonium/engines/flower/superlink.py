"""The SuperLink's process: Flower's own application behind two listeners.

The public listener serves only the Fleet paths, over TLS. The private one is on loopback and needs
a secret that only the server's process has. Flower's control calls have no login of their own, and
anyone who can make them can stop runs and admit nodes.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import os
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import uvicorn

from harmonium.engines.flower import CONNECTED, UNKNOWN, WHY_HEADER
from harmonium.engines.flower.internals import (
    ACTIVATE_PATH,
    FLEET_PATH,
    NOT_ADMITTED,
    PUBLIC_KEY_HEADER,
    online_until,
    superlink_app,
)

SECRET_HEADER = "x-harmonium-secret"
LARGEST_BODY = 64 << 20  # bytes of one request; a chunk is an eighth of that


@dataclass(frozen=True)
class LinkSettings:
    """Settings of a SuperLink's process, passed as JSON on its standard input."""

    database: str  # file, or Flower's name for one in memory
    private_port: int  # on loopback: control and runtime, for the server alone
    secret: str  # requests to the private port must have it
    host: str  # where sites connect
    port: int
    certificate: str | None  # files of the server's certificate and its key; none: no TLS
    certificate_key: str | None
    parent: int  # process id; this process ends with it


def serve(settings: LinkSettings) -> None:
    """Run a SuperLink until the parent process ends."""
    app = superlink_app(settings.database, settings.private_port)
    threading.Thread(target=_exit_with, args=(settings.parent,), daemon=True).start()

    def server(filtered: Any, host: str, port: int, **more: Any) -> uvicorn.Server:
        plain: Any = {"log_level": "warning", "access_log": False, "proxy_headers": False}
        return uvicorn.Server(uvicorn.Config(filtered, host=host, port=port, **plain, **more))

    private = server(_restricted(app, secret=settings.secret), "127.0.0.1", settings.private_port)
    tls = {"ssl_certfile": settings.certificate, "ssl_keyfile": settings.certificate_key}
    public = server(
        _restricted(_with_reason(app), path=FLEET_PATH),
        settings.host,
        settings.port,
        lifespan="off",
        **tls,
    )

    async def both() -> None:
        await asyncio.gather(private.serve(), public.serve())

    asyncio.run(both())


def _restricted(app: Any, *, path: str = "/", secret: str | None = None) -> Any:
    """The application, restricted to requests with the secret and to paths with this prefix."""

    async def filtered(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            sent = headers.get(SECRET_HEADER.encode(), b"")
            known = secret is None or hmac.compare_digest(sent, secret.encode())
            length = headers.get(b"content-length", b"")
            # A body without a length may never end.
            small = length.isdigit() and int(length) <= LARGEST_BODY
            if not (known and scope["path"].startswith(path) and small):
                await send({"type": "http.response.start", "status": 403, "headers": []})
                await send({"type": "http.response.body", "body": b""})
                return
        elif scope["type"] != "lifespan":
            return
        await app(scope, receive, send)

    return filtered


def _with_reason(app: Any) -> Any:
    """The application, with the reason in a header when it does not admit a node.

    Flower has one code for all reasons. The request is signed with the node's key by then, so the
    reason goes to nobody else.
    """

    def why(key: str) -> str:
        until = online_until(app, key)
        if until is None:
            return UNKNOWN
        return f"{CONNECTED} {max(1, math.ceil(until - time.time()))}"

    async def explained(scope: Any, receive: Any, send: Any) -> None:
        async def answer(message: Any) -> None:
            if message["type"] == "http.response.start" and message["status"] == NOT_ADMITTED:
                key = dict(scope["headers"]).get(PUBLIC_KEY_HEADER.encode(), b"")
                reason = await asyncio.to_thread(why, key.decode("ascii", "replace"))
                headers = [*message["headers"], (WHY_HEADER.encode(), reason.encode())]
                message = {**message, "headers": headers}
            await send(message)

        activates = scope["type"] == "http" and scope["path"] == ACTIVATE_PATH
        await app(scope, receive, answer if activates else send)

    return explained


def _exit_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    serve(LinkSettings(**json.load(sys.stdin)))
