"""A site's node: connected to a SuperLink, it answers one message after another.

It is warm: one process with the method, the images and torch loaded, where Flower would start a
process for every message. And it is deaf to code: it never asks for the app of a run.
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
from flwr.app.message import remove_content_from_message
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_push_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, push_objects
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from harmonium.core.errors import EngineError, HarmoniumError, one_line
from harmonium.engines.flower import CHUNK, CONNECTED, UNKNOWN, WHY_HEADER
from harmonium.engines.flower.messages import LATER, SOON, fetched, records, unpack

HEARTBEAT = 10.0  # seconds, Flower's least; a node is given up after twice that
REFUSED = 2  # Flower's code for an app that raised an exception
BEHIND = float(TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE)  # seconds a site's clock may be late
AHEAD = float(SYSTEM_TIME_TOLERANCE)  # or early
NOT_LET_IN = "the server does not let this site in"


def attend(
    answer: Callable[[bytes, list[bytes]], tuple[bytes, list[bytes]]],
    address: str,
    key: ec.EllipticCurvePrivateKey,
    certificate: Path | None,
    note: Callable[[str], None],
    ended: threading.Event,
) -> None:
    """Answer messages until told to end; a connection that breaks is made again.

    Args:
        answer: from a seal and bodies to a seal and bodies; may raise a HarmoniumError.
        address: of the server, `host:port`.
        key: the site's own.
        certificate: the federation's, by which the server is known; none: no TLS.
        note: told what a reader should know.
        ended: set to end.
    """
    said = last = ""
    while not ended.is_set():
        with _fleet(address, key, certificate) as client:
            try:
                node = Node(node_id=_activate(client, key).node_id)
            except httpx.HTTPStatusError as error:
                reason = refusal(error.response.status_code, error.response.headers, time.time())
                why = f"{NOT_LET_IN}: {reason}"
            except httpx.TransportError as error:
                why = _unreachable(address, str(error))
            else:
                note(f"connected to {address}")
                said, last, why = "", "", _serve(client, node, answer, ended)
        if ended.is_set():
            return
        kind = re.sub(r"\d+", "", why)  # seconds and times change with every try
        begins = why.startswith(NOT_LET_IN) and kind != last  # it may not have read its sites yet
        if kind != said and not begins:
            note(f"{why}; trying again until it works")
            said = kind
        last = kind
        ended.wait(2.0)


def refusal(code: int, headers: Mapping[str, str], now: float) -> str:
    """Why a server lets a site in no further, from its answer and this machine's clock."""
    known, _, seconds = headers.get(WHY_HEADER, "").partition(" ")
    if known == UNKNOWN:
        return (
            "it does not know this site's key: the site was never added, was removed, or was "
            "added after the server had started. Its operator sees who belongs by harmonium server "
            "list, and adds a site by harmonium server add NAME --key site.pub"
        )
    if known == CONNECTED:
        return (
            "it still counts this site's last connection as alive: it lets the site in about "
            f"{seconds} s from now, unless another process runs with the same kit"
        )
    if code == httpx.codes.UNAUTHORIZED:
        off = _clock_off(headers.get("date", ""), now)
        if off is not None and not -BEHIND < off < AHEAD:
            word = "ahead of" if off > 0 else "behind"
            apart = f"{abs(off) / 60:.0f} minutes" if abs(off) > 90 else f"{abs(off):.0f} s"
            return (
                f"this machine's clock is {apart} {word} the server's; up to {BEHIND:.0f} s behind "
                f"or {AHEAD:.0f} s ahead is accepted: set the clock, e.g. by NTP"
            )
        return "it does not accept this site's signature: is site.key the key of this kit?"
    return f"it answers with HTTP code {code}: is a proxy in between, or another service?"


def _clock_off(date: str, now: float) -> float | None:
    """Seconds that this machine's clock is ahead of the server's."""
    try:
        return now - parsedate_to_datetime(date).timestamp()
    except (ValueError, TypeError):
        return None


def _unreachable(address: str, error: str) -> str:
    """Why there is no connection; what trying again cannot mend is an error.

    An expired certificate is renewed at the server, and a clock may be set while the site waits.
    """
    server = f"the server at {address}"
    if "certificate has expired" in error:
        return (
            f"the certificate of {server} has expired, by this machine's clock, which says "
            f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC: its operator renews it with harmonium "
            "server renew and starts again; no new kit is needed"
        )
    if "certificate is not yet valid" in error:
        return (
            f"the certificate of {server} is not valid yet, by this machine's clock, which says "
            f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC: set the clock"
        )
    if "mismatch" in error:
        raise EngineError(
            f"{server} shows a certificate that is made for other names "
            f"({one_line(error)}): dial one of those with --server HOST:PORT"
        )
    if "CERTIFICATE_VERIFY_FAILED" in error:
        raise EngineError(
            f"{server} does not show a certificate of this federation: it is signed by another "
            f"authority ({one_line(error)}). The address or the kit is of another federation, or "
            "a proxy in between opens TLS"
        )
    return f"{server} cannot be reached ({one_line(error)})"


def _activate(client: FleetHttpClient, key: ec.EllipticCurvePrivateKey) -> Any:
    public = public_key_to_bytes(key.public_key())
    return client.ActivateNode(ActivateNodeRequest(public_key=public, heartbeat_interval=HEARTBEAT))


@contextmanager
def _fleet(
    address: str, key: ec.EllipticCurvePrivateKey, certificate: Path | None
) -> Iterator[FleetHttpClient]:
    identity = NodeAuthHttpInterceptor(key, key.public_key())
    version = RuntimeVersionHttpInterceptor(component_name="SuperNode")
    root = certificate.read_bytes() if certificate else None
    client = FleetHttpClient.from_server_address(
        address, certificate is None, root, [version, identity]
    )
    try:
        yield client
    finally:
        client.close()


def _serve(
    client: FleetHttpClient,
    node: Node,
    answer: Callable[[bytes, list[bytes]], tuple[bytes, list[bytes]]],
    ended: threading.Event,
) -> str:
    """One connection: pull, answer, push; why it ended."""
    broken = threading.Event()
    beat = threading.Thread(target=_beats, args=(client, node, broken, ended), daemon=True)
    beat.start()
    pause = SOON
    try:
        while not (ended.is_set() or broken.is_set()):
            got = client.PullMessages(PullMessagesRequest(node=node))
            if got.messages_list:
                _answer_one(client, node, got, answer)
                pause = SOON
            else:
                ended.wait(pause)
                pause = min(1.2 * pause, LATER)
        return "the server no longer counts this site as connected"
    except httpx.HTTPError as error:
        return f"the connection broke ({one_line(str(error).partition(chr(10))[0])})"
    finally:
        broken.set()
        with suppress(httpx.HTTPError):
            client.DeactivateNode(DeactivateNodeRequest(node_id=node.node_id))


def _beats(
    client: FleetHttpClient, node: Node, broken: threading.Event, ended: threading.Event
) -> None:
    request = SendNodeHeartbeatRequest(node=node, heartbeat_interval=HEARTBEAT)
    while not broken.wait(HEARTBEAT / 2):
        with suppress(httpx.HTTPError):
            if not client.SendNodeHeartbeat(request).success:
                broken.set()


def _answer_one(client: FleetHttpClient, node: Node, got: Any, answer: Any) -> None:
    """Fetch one message's content, answer it, send the answer."""
    message = message_from_proto(got.messages_list[0])
    run, tree = message.metadata.run_id, got.message_object_trees[0]
    try:
        whole = fetched(client, node, run, tree)
    except (ObjectPullError, ValueError, TypeError, LookupError):  # no message of ours
        return
    began = time.monotonic()
    try:
        sealed, bodies = answer(*unpack(whole.content))
        reply = Message(records(sealed, bodies, together=CHUNK), reply_to=whole)
    except HarmoniumError as error:
        reply = Message(Error(code=REFUSED, reason=str(error)), reply_to=whole)
    with no_object_id_recompute():
        reply.metadata.__dict__["_message_id"] = reply.object_id
        pushed = client.PushMessages(
            PushMessagesRequest(
                node=node,
                messages_list=[message_to_proto(remove_content_from_message(reply))],
                message_object_trees=[get_object_tree(reply)],
                clientapp_runtime_list=[time.monotonic() - began],
            )
        )
        push_objects(
            get_all_nested_objects(reply),
            make_push_object_fn_protobuf(client.PushObject, node, run, pushed.session_id),
            object_ids_to_push=set(pushed.objects_to_push),
        )
