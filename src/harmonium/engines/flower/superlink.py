"""The SuperLink's process: Flower's own application behind two doors.

The public door knows the Fleet paths alone, over TLS. The private one is on loopback and opens to
those who know a secret that only the server's process has. Flower's control calls have no login of
their own, and whoever can make them can stop runs and let nodes in.
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
    """What a SuperLink's process needs to know; travels as JSON on its standard input."""

    database: str  # file, or Flower's word for none
    private_port: int  # on loopback: control and runtime, for the server alone
    secret: str  # what the server must say there
    host: str  # where sites connect
    port: int
    certificate: str | None  # files of the server's certificate and its key; none: no TLS
    certificate_key: str | None
    parent: int  # process that ends this one by ending


def serve(settings: LinkSettings) -> None:
    """Run a SuperLink until the parent is gone."""
    app = superlink_app(settings.database, settings.private_port)
    threading.Thread(target=_leave_with, args=(settings.parent,), daemon=True).start()

    def server(filtered: Any, host: str, port: int, **more: Any) -> uvicorn.Server:
        plain: Any = {"log_level": "warning", "access_log": False, "proxy_headers": False}
        return uvicorn.Server(uvicorn.Config(filtered, host=host, port=port, **plain, **more))

    private = server(_only(app, secret=settings.secret), "127.0.0.1", settings.private_port)
    tls = {"ssl_certfile": settings.certificate, "ssl_keyfile": settings.certificate_key}
    public = server(
        _only(_explained(app), path=FLEET_PATH),
        settings.host,
        settings.port,
        lifespan="off",
        **tls,
    )

    async def both() -> None:
        await asyncio.gather(private.serve(), public.serve())

    asyncio.run(both())


def _only(app: Any, *, path: str = "/", secret: str | None = None) -> Any:
    """The application for those alone who know the secret, or for paths that begin so."""

    async def filtered(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            said = headers.get(SECRET_HEADER.encode(), b"")
            known = secret is None or hmac.compare_digest(said, secret.encode())
            length = headers.get(b"content-length", b"")
            small = length.isdigit() and int(length) <= LARGEST_BODY  # and no endless stream
            if not (known and scope["path"].startswith(path) and small):
                await send({"type": "http.response.start", "status": 403, "headers": []})
                await send({"type": "http.response.body", "body": b""})
                return
        elif scope["type"] != "lifespan":
            return
        await app(scope, receive, send)

    return filtered


def _explained(app: Any) -> Any:
    """The application, which also says why it does not let a node in: Flower has one code for all.

    Only who has signed the request with the key in question gets so far.
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


def _leave_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    serve(LinkSettings(**json.load(sys.stdin)))
