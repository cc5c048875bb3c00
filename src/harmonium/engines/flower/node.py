"""A site's node: connected to a SuperLink, it answers one message after another.

It is warm: one process with the method, the pictures and torch loaded, where Flower would start a
process for every message. And it is deaf to code: it never asks for the app of a run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Error, Message
from flwr.app.message import remove_content_from_message
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

from harmonium.engines.flower import CHUNK
from harmonium.engines.flower.messages import LATER, SOON, fetched, records, unpack
from harmonium.errors import EngineError, HarmoniumError, one_line

HEARTBEAT = 10.0  # seconds, Flower's least; a node is given up after twice that
REFUSED = 2  # Flower's code for an app that raised an exception


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
    said = ""
    while not ended.is_set():
        with _fleet(address, key, certificate) as client:
            try:
                node = Node(node_id=_activate(client, key).node_id)
            except httpx.HTTPStatusError as error:
                why = f"the server does not let this site in ({error.response.status_code}): "
                why += "its key is not enrolled, or its last connection is still counted as alive"
            except httpx.TransportError as error:
                if "CERTIFICATE_VERIFY_FAILED" in str(error):
                    raise EngineError(
                        f"the server at {address} does not show a certificate of this federation "
                        f"({error}): check the address and the kit"
                    ) from None
                why = f"the server at {address} cannot be reached ({error})"
            else:
                note(f"connected to {address}")
                said, why = "", _serve(client, node, answer, ended)
        if ended.is_set():
            return
        if why != said:
            note(f"{why}; trying again until it works")
            said = why
        ended.wait(2.0)


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
