"""Everything of Flower that is not part of its public API, behind functions of ours.

Flower's public API is what its reference lists: the names in `__all__` of `flwr.app`,
`flwr.clientapp`, `flwr.serverapp` and their like. It has apps that Flower starts and strategies
that Flower drives. It has no way to run a SuperLink behind an application of ours, to be the
executor of a run, or to be a node that answers in a warm process without fetching an app. These
functions do that; no other module of Harmonium touches a private name of flwr.

tests/engines/test_flower_internals.py names what is used here, and shows after an upgrade of flwr
what is missing. Those tests and tests/engines/test_flower.py ran in November 2026 with:

    1.39.0  fails: no modules fleet_http_client and node_auth_http_interceptor in flwr.supernode,
            no FLEET_HTTP_PUBLIC_KEY_HEADER, no fleet_event_log_plugin in the configuration
    1.40.0  passes
    1.41.0  passes; the version in constraints.txt
    1.42.0  passes, but only installed by force: it needs a certifi that pip could not find. So it
            is outside the range in pyproject.toml

A server and a node of different versions from 1.40 to 1.42 exchanged messages (1.41 with 1.40 both
ways, 1.42 with a node of 1.40). A database of 1.40 opens with 1.41, but not the other way round: a
server that goes back to an older flwr cannot read its flower.db.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.cli import build
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE, SubStatus
from flwr.common.serde import fab_to_proto, message_from_proto, message_to_proto, run_from_proto
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, StartRunRequest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    FLWR_IN_MEMORY_DB_NAME,
    NodeStatus,
    TaskType,
)
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    inflate_object_from_contents,
    pull_objects,
    push_objects,
)
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
from flwr.superlink.config_loader import SuperLinkLifespanConfig, load_control_authn_plugin
from flwr.superlink.grid import HttpGrid
from flwr.superlink.main import create_app
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

IN_MEMORY_DATABASE = str(FLWR_IN_MEMORY_DB_NAME)  # a `database` of `superlink_app`
FLEET_PATH = "/v1/fleet/"  # where the paths for nodes begin
ACTIVATE_PATH = "/v1/fleet/activate-node"
NOT_ADMITTED = 412  # HTTP code for an unknown key and for a node that is still connected
PUBLIC_KEY_HEADER = str(FLEET_HTTP_PUBLIC_KEY_HEADER)  # of a node's request, in base64
CLOCK_BEHIND = float(TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE)  # seconds a node's may be late
CLOCK_AHEAD = float(SYSTEM_TIME_TOLERANCE)  # or early

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0  # seconds between two polls: at first, and at most


# ---- the SuperLink's process ---------------------------------------------------------------------


def superlink_app(database: str, port: int) -> Any:
    """Return Flower's SuperLink as an ASGI application that admits only registered nodes.

    Uses `flwr.superlink.main.create_app` and its configuration. The public way to start a SuperLink
    is the command flower-superlink, which serves all of its paths at one port without a login.
    """
    config = SuperLinkLifespanConfig(
        control_address="127.0.0.1:0",
        health_server_address=None,
        host="127.0.0.1",
        port=port,
        insecure=True,
        certificates=None,
        superexec_auth_secret=None,
        authn_plugin=load_control_authn_plugin(),
        event_log_plugin=None,
        fleet_event_log_plugin=None,
        enable_event_log=False,
        artifact_provider=None,
        enable_supernode_auth=True,  # only registered keys, also where TLS is off
        fleet_api_type="grpc-rere",
        fleet_api_address=None,
        simulation=False,
        ssl_ca_certfile=None,
        ssl_certfile=None,
        ssl_keyfile=None,
        database=database,
        isolation="process",  # nothing is started that would run an app
        runtime_dependency_install=False,
    )
    return create_app(config, SuperLinkLifespan)


def online_until(app: Any, key: str) -> float | None:
    """Return when a node's last connection lapses, as a Unix time; None for an unknown key.

    Uses the `linkstate_factory` in the application's state. Flower answers with the same code to an
    unknown node and to one that is still connected; no public call distinguishes them.

    Args:
        app: from `superlink_app`.
        key: the node's public key in base64, as it stands in `PUBLIC_KEY_HEADER`.
    """
    state = app.state.linkstate_factory.state()
    node = state.get_node_id_by_public_key(b64decode(key))
    if node is None:
        return None
    infos = state.get_node_info(node_ids=[node])
    return max((info.online_until or 0.0 for info in infos), default=0.0)


# ---- the server's process ------------------------------------------------------------------------


class _Headers:
    """Adds headers to every request of one of Flower's HTTP clients."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._headers = headers

    def intercept(self, context: Any, call_next: Any) -> httpx.Response:
        context.request.headers.update(self._headers)
        return call_next(context)  # type: ignore[no-any-return]


def _client(kind: Any, address: str, headers: Mapping[str, str], *more: Any) -> Any:
    version = RuntimeVersionHttpInterceptor(component_name="flwr-serverapp")
    return kind.from_server_address(address, True, None, [version, _Headers(headers), *more])


def control_client(address: str, headers: Mapping[str, str]) -> Any:
    """Return a client of the SuperLink's control calls; close it after use.

    Uses `ControlHttpClient`. The public way to make these calls is the command flwr, which cannot
    send headers of ours.
    """
    return _client(ControlHttpClient, address, headers)


def online_nodes(control: Any) -> dict[int, str]:
    """Return the ids of the nodes that are connected now, with the time when each connected.

    Uses the control call `ListNodes`. The public `Grid.get_node_ids` does not report the
    time, which shows that a node has reconnected.
    """
    nodes = control.ListNodes(ListNodesRequest()).nodes_info
    return {n.node_id: n.last_activated_at for n in nodes if n.status == NodeStatus.ONLINE}


def register_node(control: Any, key: ec.EllipticCurvePublicKey) -> int:
    """Admit the node that has this key and return its id, by the control call `RegisterNode`.

    The public way is the command flwr supernode register.
    """
    request = RegisterNodeRequest(public_key=public_key_to_bytes(key))
    return int(control.RegisterNode(request).node_id)


def build_fab_from_files(files: Mapping[str, bytes]) -> bytes:
    """Return a Flower App Bundle of these files, by the function in `flwr.cli.build`.

    The public way is the command flwr build, which wants a folder.
    """
    return bytes(build.build_fab_from_files(files)[0])


def start_run(control: Any, fab: bytes, digest: str) -> int:
    """Start a run of an app and return its id, by the control call `StartRun`.

    The public way is the command flwr run, which cannot send headers of ours.
    """
    return int(control.StartRun(StartRunRequest(fab=fab_to_proto(Fab(digest, fab, {})))).run_id)


def runtime_client(address: str, headers: Mapping[str, str]) -> Any:
    """Return a client of the SuperLink's calls for executors; close it after use.

    Uses `RuntimeHttpClient`. The public way to execute runs is the command flower-superexec, which
    starts a process for each; here the server's process is the executor.
    """
    return _client(RuntimeHttpClient, address, headers)


def acquire_run(runtime: Any) -> tuple[int, str] | None:
    """Return the id and the token of a run that waits for an executor, or None.

    Uses the runtime call `AcquireTask`; flower-superexec does the same.
    """
    response = runtime.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP]))
    return (response.task.run_id, response.token) if response.token else None


class Grid(HttpGrid):
    """The grid of a run that this process executes, for a SuperLink that wants headers of ours.

    Overrides `_connect` of Flower's `HttpGrid`, and uses its `_client`, `_runtime_client`, `_addr`
    and `_token`. The public `flwr.serverapp.Grid` is abstract; Flower makes one and hands it to an
    app, with neither headers nor the calls of an executor.
    """

    def __init__(self, address: str, headers: Mapping[str, str], token: str) -> None:
        """Take over the run that the token of `acquire_run` is for.

        Sets `TaskIdentity`, without which the public `Message` cannot be made.
        """
        super().__init__(address, insecure=True, token=token)
        self._our_headers = headers
        task = self._runtime_client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, task.run.run_id
        TaskIdentity.node_id = task.context.node_id
        self.set_run(run_from_proto(task.run))

    def _connect(self) -> None:
        token = RuntimeTokenHttpInterceptor(token=self._token)
        self._client = _client(RuntimeHttpClient, self._addr, self._our_headers, token)

    def replies(self, tickets: Sequence[str]) -> Iterator[tuple[str, Message | None]]:
        """Yield the replies that have come, by ticket; None where the content never did.

        The public `pull_messages` fetches all of them before it returns the first.
        """
        client, run = self._runtime_client, self.run.run_id
        pulled = client.PullMessages(PullAppMessagesRequest(message_ids=tickets))
        for proto, tree in zip(pulled.messages_list, pulled.message_object_trees, strict=True):
            yield proto.metadata.reply_to_message_id, _fetch(client, self.node, run, tree)

    def send_heartbeat(self) -> None:
        """Report that the run's executor is alive, as Flower's executor does."""
        self._runtime_client.SendTaskHeartbeat(SendTaskHeartbeatRequest())

    def finish_run(self, *, completed: bool) -> None:
        """Report that the run is completed or stopped, as Flower's executor does."""
        status = SubStatus.COMPLETED if completed else SubStatus.STOPPED
        self._runtime_client.PushTaskOutput(PushTaskOutputRequest(sub_status=status, details=""))


# ---- a node's process ----------------------------------------------------------------------------


def fleet_client(
    address: str, key: ec.EllipticCurvePrivateKey, certificate: bytes | None
) -> FleetHttpClient:
    """Return a client of the SuperLink's fleet calls, signed with a node's key; close it after use.

    Uses `FleetHttpClient`. The public way to be a node is the command flower-supernode, which runs
    any app that the SuperLink offers, in a new process for each message.

    Args:
        address: of the SuperLink, `host:port`.
        key: the node's private key.
        certificate: of the authority that signed the SuperLink's, in PEM; None: no TLS.
    """
    identity = NodeAuthHttpInterceptor(key, key.public_key())
    version = RuntimeVersionHttpInterceptor(component_name="SuperNode")
    return FleetHttpClient.from_server_address(
        address, certificate is None, certificate, [version, identity]
    )


def activate_node(
    client: FleetHttpClient, key: ec.EllipticCurvePublicKey, heartbeat: float
) -> Node:
    """Connect a registered node, by the fleet call `ActivateNode`, as flower-supernode does."""
    request = ActivateNodeRequest(public_key=public_key_to_bytes(key), heartbeat_interval=heartbeat)
    return Node(node_id=client.ActivateNode(request).node_id)


def deactivate_node(client: FleetHttpClient, node: Node) -> None:
    """Disconnect a node, by the fleet call `DeactivateNode`, as flower-supernode does."""
    client.DeactivateNode(DeactivateNodeRequest(node_id=node.node_id))


def send_node_heartbeat(client: FleetHttpClient, node: Node, heartbeat: float) -> bool:
    """Send a heartbeat and return whether the SuperLink counts the node as connected.

    Uses the fleet call `SendNodeHeartbeat`; flower-supernode does the same.
    """
    request = SendNodeHeartbeatRequest(node=node, heartbeat_interval=heartbeat)
    return bool(client.SendNodeHeartbeat(request).success)


def pull_message(client: FleetHttpClient, node: Node) -> tuple[int, Message | None] | None:
    """Return the id of its run and the next message for a node; None when there is none.

    The message is None when its content never comes or cannot be read. Uses the fleet call
    `PullMessages`; the public API hands messages only to an app that flower-supernode starts.
    """
    pulled = client.PullMessages(PullMessagesRequest(node=node))
    if not pulled.messages_list:
        return None
    run = message_from_proto(pulled.messages_list[0]).metadata.run_id
    return run, _fetch(client, node, run, pulled.message_object_trees[0])


def push_reply(
    client: FleetHttpClient, node: Node, run: int, reply: Message, seconds: float
) -> None:
    """Send a reply in a run, with its content and the seconds that the answer took.

    Uses the fleet calls `PushMessages` and `PushObject`, the functions that split a message into
    objects, and the `_message_id` of its metadata, which has no public setter. The public API sends
    only what an app returns that flower-supernode started.
    """
    with no_object_id_recompute():
        reply.metadata.__dict__["_message_id"] = reply.object_id
        pushed = client.PushMessages(
            PushMessagesRequest(
                node=node,
                messages_list=[message_to_proto(remove_content_from_message(reply))],
                message_object_trees=[get_object_tree(reply)],
                clientapp_runtime_list=[seconds],
            )
        )
        push_objects(
            get_all_nested_objects(reply),
            make_push_object_fn_protobuf(client.PushObject, node, run, pushed.session_id),
            object_ids_to_push=set(pushed.objects_to_push),
        )


# ---- both sides ----------------------------------------------------------------------------------


def _fetch(client: Any, node: Node, run: int, tree: Any) -> Message | None:
    """Return the whole of a message whose content may still be on its way; None if it never comes.

    Uses the functions that join the objects of a message, and the `_message_id` of its metadata,
    which has no public setter. The public `Grid.pull_messages` waits a second before it asks again
    for an object that has not arrived, and nodes have no public way.
    """
    try:
        contents = pull_objects(
            [part.object_id for part in iterate_object_tree(tree)],
            make_pull_object_fn_protobuf(client.PullObject, node, run),
            initial_backoff=FIRST_PAUSE,
            backoff_cap=LONGEST_PAUSE,
        )
        make_confirm_message_received_fn_protobuf(client.ConfirmMessageReceived, node, run)(
            tree.object_id
        )
        message = inflate_object_from_contents(tree.object_id, contents)
    except (ObjectPullError, ValueError, TypeError, LookupError):
        return None
    if not isinstance(message, Message):
        return None
    message.metadata.__dict__["_message_id"] = tree.object_id
    return message
