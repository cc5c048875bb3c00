"""What Harmonium uses of Flower beyond its public API is all there, and in one module alone.

Names are checked one by one, without importing `internals`: after an upgrade of flwr, the tests
that fail name what is missing.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import harmonium
from harmonium.engines.flower import CHUNK

pytest.importorskip("flwr")

SOURCE = Path(harmonium.__file__).parent
INTERNALS = SOURCE / "engines" / "flower" / "internals.py"
DOCUMENTED = ("agentapp", "app", "client", "clientapp", "common", "server", "serverapp")
DOCUMENTED += ("simulation",)  # the packages in Flower's API reference

CLIENT = "from_server_address(server_address insecure root_certificates interceptors)"
CONFIG = (
    "control_address health_server_address host port insecure certificates superexec_auth_secret "
    "authn_plugin event_log_plugin fleet_event_log_plugin enable_event_log artifact_provider "
    "enable_supernode_auth fleet_api_type fleet_api_address simulation ssl_ca_certfile "
    "ssl_certfile ssl_keyfile database isolation runtime_dependency_install"
)
# Module: names in it; `Name.attribute` or a message's field; `name(parameters)` of a callable,
# with all that it needs and those with a default that are given.
USED = {
    "flwr.app": ["Message", "Message.object_id"],
    "flwr.app.message": ["remove_content_from_message"],
    "flwr.cli.build": ["build_fab_from_files(files)"],
    "flwr.common.constant": [
        "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE",
        "SYSTEM_TIME_TOLERANCE",
        "TIMESTAMP_TOLERANCE",
        "SubStatus.COMPLETED",
        "SubStatus.STOPPED",
    ],
    "flwr.common.serde": [
        "fab_to_proto",
        "message_from_proto",
        "message_to_proto",
        "run_from_proto",
    ],
    "flwr.proto.control_pb2": [
        "ListNodesRequest",
        "ListNodesResponse.nodes_info",
        "RegisterNodeRequest.public_key",
        "RegisterNodeResponse.node_id",
        "StartRunRequest.fab",
        "StartRunResponse.run_id",
    ],
    "flwr.proto.fleet_pb2": [
        "ActivateNodeRequest.heartbeat_interval",
        "ActivateNodeRequest.public_key",
        "ActivateNodeResponse.node_id",
        "DeactivateNodeRequest.node_id",
        "PullMessagesRequest.node",
        "PullMessagesResponse.message_object_trees",
        "PullMessagesResponse.messages_list",
        "PushMessagesRequest.clientapp_runtime_list",
        "PushMessagesRequest.message_object_trees",
        "PushMessagesRequest.messages_list",
        "PushMessagesRequest.node",
        "PushMessagesResponse.objects_to_push",
        "PushMessagesResponse.session_id",
    ],
    "flwr.proto.heartbeat_pb2": [
        "SendNodeHeartbeatRequest.heartbeat_interval",
        "SendNodeHeartbeatRequest.node",
        "SendNodeHeartbeatResponse.success",
    ],
    "flwr.proto.message_pb2": ["Metadata.reply_to_message_id", "ObjectTree.object_id"],
    "flwr.proto.node_pb2": [
        "Node.node_id",
        "NodeInfo.last_activated_at",
        "NodeInfo.node_id",
        "NodeInfo.online_until",
        "NodeInfo.status",
    ],
    "flwr.proto.runtime_pb2": [
        "AcquireTaskRequest.supported_task_types",
        "AcquireTaskResponse.task",
        "AcquireTaskResponse.token",
        "PullAppMessagesRequest.message_ids",
        "PullAppMessagesResponse.message_object_trees",
        "PullAppMessagesResponse.messages_list",
        "PullTaskInputRequest",
        "PullTaskInputResponse.context",
        "PullTaskInputResponse.run",
        "PullTaskInputResponse.task_id",
        "PushTaskOutputRequest.details",
        "PushTaskOutputRequest.sub_status",
        "SendTaskHeartbeatRequest",
    ],
    "flwr.server.superlink.linkstate": [
        "LinkState.get_node_id_by_public_key",
        "LinkState.get_node_info(node_ids)",
    ],
    "flwr.supercore.constant": [
        "FLEET_HTTP_PUBLIC_KEY_HEADER",
        "FLWR_IN_MEMORY_DB_NAME",
        "NodeStatus.ONLINE",
        "TaskType.SERVER_APP",
    ],
    "flwr.supercore.control.control_http_client": [
        "ControlHttpClient.ListNodes",
        "ControlHttpClient.RegisterNode",
        "ControlHttpClient.StartRun",
        "ControlHttpClient.close",
        f"ControlHttpClient.{CLIENT}",
    ],
    "flwr.supercore.fab": ["Fab(hash_str content verifications)"],
    "flwr.supercore.inflatable.inflatable_object": [
        "get_all_nested_objects",
        "get_object_tree",
        "iterate_object_tree",
        "no_object_id_recompute",
    ],
    "flwr.supercore.inflatable.inflatable_protobuf_utils": [
        "make_confirm_message_received_fn_protobuf",
        "make_pull_object_fn_protobuf(pull_object_protobuf node run_id)",
        "make_push_object_fn_protobuf(push_object_protobuf node run_id session_id)",
    ],
    "flwr.supercore.inflatable.inflatable_utils": [
        "ObjectPullError",
        "inflate_object_from_contents(object_id object_contents)",
        "pull_objects(object_ids pull_object_fn initial_backoff backoff_cap)",
        "push_objects(objects push_object_fn object_ids_to_push)",
    ],
    "flwr.supercore.interceptors": [
        "RuntimeTokenHttpInterceptor(token)",
        "RuntimeVersionHttpInterceptor(component_name)",
    ],
    "flwr.supercore.primitives.asymmetric": ["public_key_to_bytes"],
    "flwr.supercore.runtime": [
        "RuntimeHttpClient.AcquireTask",
        "RuntimeHttpClient.ConfirmMessageReceived",
        "RuntimeHttpClient.PullMessages",
        "RuntimeHttpClient.PullObject",
        "RuntimeHttpClient.PullTaskInput",
        "RuntimeHttpClient.PushTaskOutput",
        "RuntimeHttpClient.SendTaskHeartbeat",
        "RuntimeHttpClient.close",
        f"RuntimeHttpClient.{CLIENT}",
    ],
    "flwr.supercore.task_identity": ["TaskIdentity", "TaskIdentity._task_id"],
    "flwr.superlink.cli.flower_superlink": ["SuperLinkLifespan"],
    "flwr.superlink.config_loader": [
        f"SuperLinkLifespanConfig({CONFIG})",
        "load_control_authn_plugin()",
    ],
    "flwr.superlink.grid": [
        "HttpGrid(runtime_api_address insecure token)",
        "HttpGrid._connect",
        "HttpGrid._runtime_client",
        "HttpGrid.run",
        "HttpGrid.set_run",
    ],
    "flwr.superlink.main": ["create_app(config superlink_lifespan_class)"],
    "flwr.supernode.fleet_http_client": [
        "FleetHttpClient.ActivateNode",
        "FleetHttpClient.ConfirmMessageReceived",
        "FleetHttpClient.DeactivateNode",
        "FleetHttpClient.PullMessages",
        "FleetHttpClient.PullObject",
        "FleetHttpClient.PushMessages",
        "FleetHttpClient.PushObject",
        "FleetHttpClient.SendNodeHeartbeat",
        "FleetHttpClient.close",
        f"FleetHttpClient.{CLIENT}",
    ],
    "flwr.supernode.node_auth_http_interceptor": [
        "NodeAuthHttpInterceptor(private_key public_key)"
    ],
}
PRIVATE = {"_addr", "_client", "_connect", "_message_id", "_runtime_client", "_token"}


def found(module: str, name: str) -> Any:
    """The named object; fails with the name of what is missing."""
    try:
        value: Any = import_module(module)
    except ModuleNotFoundError as error:
        pytest.fail(f"flwr has no module {error.name}")
    path, _, parameters = name.partition("(")
    for attribute in path.split("."):
        fields = getattr(getattr(value, "DESCRIPTOR", None), "fields_by_name", {})
        if attribute in fields:
            return None
        if not hasattr(value, attribute):
            pytest.fail(f"flwr lacks {module}.{path}: no {attribute}")
        value = getattr(value, attribute)
    if "(" in name:
        accepted = inspect.signature(value).parameters
        for parameter in parameters.rstrip(")").split():
            assert parameter in accepted, f"flwr lacks parameter {parameter} of {module}.{path}"
        needed = {p.name for p in accepted.values() if p.default is p.empty} - {"self"}
        more = needed - set(parameters.rstrip(")").split())
        assert not more, f"{module}.{path} also needs {', '.join(sorted(more))}"
    return value


@pytest.mark.parametrize(
    ("module", "name"),
    [(module, name) for module, names in USED.items() for name in names],
    ids=lambda text: text.partition("(")[0],
)
def test_flower_has_what_is_used(module: str, name: str) -> None:
    found(module, name)


@pytest.mark.parametrize("name", ["_addr", "_client", "_token", "node"])
def test_a_grid_has_what_is_used(name: str) -> None:
    grid = found("flwr.superlink.grid", "HttpGrid")("127.0.0.1:1", insecure=True, token="none")
    assert hasattr(grid, name), f"flwr lacks {name} of HttpGrid"


def test_a_message_keeps_its_id_where_it_is_set() -> None:
    from flwr.app import Metadata

    settings = dict.fromkeys(inspect.signature(Metadata).parameters, 0)
    metadata = Metadata(**{**settings, "message_id": "", "message_type": "train"})
    assert "_message_id" in vars(metadata), "flwr lacks _message_id of Metadata"
    metadata.__dict__["_message_id"] = "1"
    assert metadata.message_id == "1"


def test_the_size_of_chunks_is_ours() -> None:
    assert found("flwr.common.constant", "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE") == CHUNK


def test_the_superlink_has_the_paths_and_the_state_that_are_used() -> None:
    internals = import_module("harmonium.engines.flower.internals")
    app = internals.superlink_app(internals.IN_MEMORY_DATABASE, 1)
    assert internals.ACTIVATE_PATH in app.openapi()["paths"], internals.ACTIVATE_PATH
    assert internals.ACTIVATE_PATH.startswith(internals.FLEET_PATH)
    assert hasattr(app.state, "linkstate_factory"), "flwr lacks linkstate_factory"
    assert internals.online_until(app, "") is None


# ---- in one module alone -------------------------------------------------------------------------


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Modules of flwr that are imported or named in a text, with the names from them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Constant) and re.fullmatch(r"flwr(\.\w+)+", str(node.value)):
            yield node.value, ""


def is_public(module: str, name: str) -> bool:
    """Whether Flower's reference lists it: it is reached by `__all__` of the documented packages.

    See "Public and private APIs" in Flower's documentation.
    """
    root, *parts = [*module.split("."), *([name] if name else [])]
    value = import_module(root)
    for depth, part in enumerate(parts):
        if part not in (getattr(value, "__all__", ()) if depth else DOCUMENTED):
            return False
        value = getattr(value, part)
    return True


def private_uses(tree: ast.AST, *, of_flower: bool) -> Iterator[str]:
    """What a module touches of flwr that is not public."""
    names = [pair for pair in imports(tree) if pair[0].split(".")[0] == "flwr"]
    yield from (" ".join(pair) for pair in names if not is_public(*pair))
    if not (names or of_flower):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "os")
            if node.attr in PRIVATE or not own:
                yield f"{node.attr} in line {node.lineno}"
        if isinstance(node, ast.Constant) and node.value in PRIVATE:
            yield f"{node.value} in line {node.lineno}"


@pytest.mark.parametrize(
    "path",
    sorted(path for path in SOURCE.rglob("*.py") if path != INTERNALS),
    ids=lambda path: str(path.relative_to(SOURCE)),
)
def test_no_other_module_touches_what_is_private(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    uses = list(private_uses(tree, of_flower=path.parent == INTERNALS.parent))
    assert not uses, f"{path.name} uses {', '.join(uses)}; put it into {INTERNALS.name}"


@pytest.mark.parametrize(
    ("text", "use"),
    [
        ("from flwr.app.message import make_message", "flwr.app.message make_message"),
        ("from flwr.common.constant import SubStatus", "flwr.common.constant SubStatus"),
        ("from flwr import superlink", "flwr superlink"),
        ("import flwr.superlink.grid", "flwr.superlink.grid"),
        ("import_module('flwr.supercore.fab')", "flwr.supercore.fab"),
        ("from flwr.app import Message\nm.metadata.__dict__['_message_id'] = 1", "_message_id"),
        ("import flwr.app\ngrid._anything()", "_anything"),
    ],
)
def test_a_private_use_is_found(text: str, use: str) -> None:
    (told,) = private_uses(ast.parse(text), of_flower=False)
    assert told.startswith(use)


def test_a_public_use_is_allowed() -> None:
    text = "import flwr.app\nfrom flwr.app import Message\nfrom flwr.serverapp import strategy"
    assert not list(private_uses(ast.parse(text), of_flower=True))


def test_the_list_names_everything_that_is_imported() -> None:
    listed = {
        (module, re.split(r"[.(]", name)[0]) for module, names in USED.items() for name in names
    }
    tree = ast.parse(INTERNALS.read_text(encoding="utf-8"))
    used = {pair for pair in imports(tree) if pair[0].split(".")[0] == "flwr"}
    used -= {("flwr.cli", "build")}  # whose one function is listed
    assert not used - listed, f"not in USED: {sorted(used - listed)}"
