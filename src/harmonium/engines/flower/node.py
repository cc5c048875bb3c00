"""A site's node: connected to a SuperLink, it answers one message after another.

One process keeps the method, the images and torch loaded, where Flower would start a process for
every message. The node never fetches the app of a run, so no code from the server runs here.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Error, Message

from harmonium.core.errors import EngineError, HarmoniumError, one_line
from harmonium.core.notes import Note
from harmonium.engines.flower import CHUNK, CONNECTED, UNKNOWN, WHY_HEADER, internals
from harmonium.engines.flower.internals import CLOCK_AHEAD, CLOCK_BEHIND, FIRST_PAUSE, LONGEST_PAUSE
from harmonium.engines.flower.messages import records, unpack

HEARTBEAT = 10.0  # seconds, Flower's least; a node counts as gone after twice that
REFUSED = 2  # Flower's code for an app that raised an exception
NOT_ADMITTED = "the server does not admit this site"


def answer_messages(
    answer: Callable[[bytes, list[bytes]], tuple[bytes, list[bytes]]],
    address: str,
    key: ec.EllipticCurvePrivateKey,
    certificate: Path | None,
    note: Callable[[str], None],
    ended: threading.Event,
    contact: Callable[[str | None], None] = lambda why: None,
) -> None:
    """Answer messages until `ended` is set; reconnect when the connection breaks.

    Args:
        answer: maps a seal and bodies to a seal and bodies; may raise a HarmoniumError.
        address: of the server, `host:port`.
        key: the site's private key.
        certificate: of the federation's authority, which verifies the server; none: no TLS.
        note: called with each message for the user.
        ended: an event that stops the node when it is set.
        contact: called with None when the server has responded, else with why it cannot be reached.
    """
    reported = last = ""
    while not ended.is_set():
        with _fleet(address, key, certificate) as client:
            try:
                node = internals.activate_node(client, key.public_key(), HEARTBEAT)
            except httpx.HTTPStatusError as error:
                reason = refusal(error.response.status_code, error.response.headers, time.time())
                why = f"{NOT_ADMITTED}: {reason}"
            except httpx.TransportError as error:
                why = _unreachable(address, str(error))
            else:
                note(f"connected to {address}")
                reported, last, why = "", "", _serve(client, node, answer, ended, contact)
        if ended.is_set():
            return
        contact(why)
        kind = re.sub(r"\d+", "", why)  # seconds and times change with every try
        first = why.startswith(NOT_ADMITTED) and kind != last  # the server may still be starting
        if kind != reported and not first:
            note(Note(f"{why}; retrying until it works", "warning"))
            reported = kind
        last = kind
        ended.wait(2.0)


def refusal(code: int, headers: Mapping[str, str], now: float) -> str:
    """Why the server does not admit a site, from its response and this machine's clock."""
    known, _, seconds = headers.get(WHY_HEADER, "").partition(" ")
    if known == UNKNOWN:
        return (
            "it does not know this site's key: the site was never added, was removed, or was "
            "added after the server had started. Its operator lists the sites with harmonium "
            "server list, and adds one with harmonium server add NAME --key site.pub"
        )
    if known == CONNECTED:
        return (
            "it still counts this site's last connection as alive: it will admit the site in about "
            f"{seconds} s, unless another process runs with the same kit"
        )
    if code == httpx.codes.UNAUTHORIZED:
        offset = _clock_offset(headers.get("date", ""), now)
        if offset is not None and not -CLOCK_BEHIND < offset < CLOCK_AHEAD:
            side, seconds_off = "ahead of" if offset > 0 else "behind", abs(offset)
            size = f"{seconds_off / 60:.0f} minutes" if seconds_off > 90 else f"{seconds_off:.0f} s"
            return (
                f"this machine's clock is {size} {side} the server's; up to "
                f"{CLOCK_BEHIND:.0f} s behind or {CLOCK_AHEAD:.0f} s ahead is accepted: "
                "set the clock, e.g. by NTP"
            )
        return "it does not accept this site's signature: is site.key the key of this kit?"
    return f"it answers with HTTP code {code}: is there a proxy, or another service at its address?"


def _clock_offset(date: str, now: float) -> float | None:
    """Seconds that this machine's clock is ahead of the server's."""
    try:
        return now - parsedate_to_datetime(date).timestamp()
    except (ValueError, TypeError):
        return None


def _unreachable(address: str, error: str) -> str:
    """Why there is no connection; raises an error where trying again cannot help.

    An expired certificate is renewed at the server, and a clock may be set while the site waits.
    """
    server = f"the server at {address}"
    if "certificate has expired" in error:
        return (
            f"the certificate of {server} has expired, by this machine's clock, which says "
            f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC: its operator renews it with harmonium "
            "server renew and restarts the server; no new kit is needed"
        )
    if "certificate is not yet valid" in error:
        return (
            f"the certificate of {server} is not valid yet, by this machine's clock, which says "
            f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC: set the clock"
        )
    if "mismatch" in error:
        raise EngineError(
            f"{server} presents a certificate for other names "
            f"({one_line(error)}): connect to one of those with --server HOST:PORT"
        )
    if "CERTIFICATE_VERIFY_FAILED" in error:
        raise EngineError(
            f"{server} does not present a certificate of this federation: it is signed by another "
            f"authority ({one_line(error)}). The address or the kit belongs to another "
            "federation, or a proxy intercepts TLS"
        )
    return f"{server} cannot be reached ({one_line(error)})"


@contextmanager
def _fleet(
    address: str, key: ec.EllipticCurvePrivateKey, certificate: Path | None
) -> Iterator[Any]:
    root = certificate.read_bytes() if certificate else None
    client = internals.fleet_client(address, key, root)
    try:
        yield client
    finally:
        client.close()


def _serve(
    client: Any,
    node: Any,
    answer: Callable[[bytes, list[bytes]], tuple[bytes, list[bytes]]],
    ended: threading.Event,
    contact: Callable[[str | None], None],
) -> str:
    """Pull, answer and push over one connection; return why it ended."""
    broken = threading.Event()
    arguments = (client, node, broken, contact)
    beat = threading.Thread(target=_send_heartbeats, args=arguments, daemon=True)
    beat.start()
    pause = FIRST_PAUSE
    try:
        while not (ended.is_set() or broken.is_set()):
            pulled = internals.pull_message(client, node)
            contact(None)
            if pulled is not None:
                _answer_one(client, node, *pulled, answer)
                pause = FIRST_PAUSE
            else:
                ended.wait(pause)
                pause = min(1.2 * pause, LONGEST_PAUSE)
        return "the server no longer counts this site as connected"
    except httpx.HTTPError as error:
        return f"the connection broke ({one_line(str(error).partition(chr(10))[0])})"
    finally:
        broken.set()
        with suppress(httpx.HTTPError):
            internals.deactivate_node(client, node)


def _send_heartbeats(
    client: Any, node: Any, broken: threading.Event, contact: Callable[[str | None], None]
) -> None:
    while not broken.wait(HEARTBEAT / 2):
        with suppress(httpx.HTTPError, MemoryError):  # a task may have taken all memory for now
            if internals.send_node_heartbeat(client, node, HEARTBEAT):
                contact(None)
            else:
                broken.set()


def _answer_one(client: Any, node: Any, run: int, message: Message | None, answer: Any) -> None:
    """Answer a message of a run and send the answer."""
    if message is None:  # its content could not be read
        return
    began = time.monotonic()
    try:
        sealed, bodies = answer(*unpack(message.content))
        reply = Message(records(sealed, bodies, inline=CHUNK), reply_to=message)
    except HarmoniumError as error:
        reply = Message(Error(code=REFUSED, reason=str(error)), reply_to=message)
    internals.push_reply(client, node, run, reply, time.monotonic() - began)
