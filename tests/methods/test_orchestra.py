"""Orchestra: what is clustered where, what leaves, and what does not."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harmonium.core import codec, seeds
from harmonium.core.errors import ConfigError
from harmonium.federation.card import card
from harmonium.learning.client import Client, Decline, Examples
from harmonium.methods import orchestra
from harmonium.methods.orchestra.clustering import global_clustering
from harmonium.methods.orchestra.memory import ProjectionMemory
from harmonium.privacy.mechanisms import Noise
from harmonium.recipe.schema import Recipe
from harmonium.runs.start import run
from harmonium.testing import Trial, check_method, first_trial

pytestmark = pytest.mark.usefixtures("undrawn")

SMALL: dict[str, Any] = {"name": "orchestra", "clusters": 8, "local_clusters": 3, "global_steps": 9}


def trial(method: dict[str, Any] | None = None, **changes: Any) -> Trial:
    return first_trial("orchestra", **{"method": {**SMALL, **(method or {})}, **changes})


def client_of(found: Trial, number: int = 0, images: int | None = None) -> Client:
    rng = seeds.torch_rng(0, "test", number)
    index = found.split.indices[number][:images]
    examples = Examples(found.dataset.train.without_labels(), index)
    return Client(number, 1, 2, examples, found.method.views, rng, Noise("simulated", rng))


def entries(found: Trial, step: str) -> list[dict[str, Any]]:
    return [entry for entry in map(json.loads, found.lines) if entry["step"] == step]


class Recorder:
    """An engine that keeps every answer and every broadcast as it would be sent."""

    def __init__(self, engine: Any, sent: list[Any]) -> None:
        self.engine, self.sent = engine, sent

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def deliver(self, ask: Any, turn: Any) -> Any:
        for reply in self.engine.deliver(ask, turn):
            self.sent.append(reply.up)
            yield reply


# ---- the memory stays ----------------------------------------------------------------------------


@pytest.mark.parametrize("local_clusters", [3, 0])
def test_no_row_of_a_memory_is_in_any_byte_that_is_sent(
    local_clusters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rows shall leave, the same search finds them."""
    held: list[Tensor] = []
    newest = ProjectionMemory.newest

    def watched(self: Any) -> tuple[Tensor, Tensor]:
        images, rows = newest(self)
        held.append(rows)
        return images, rows

    monkeypatch.setattr(ProjectionMemory, "newest", watched)
    sent: list[Any] = []
    more = {"local_clusters": local_clusters, "k_min": 2 if local_clusters else 1}
    found = trial(more)
    assert found.again(wrap=lambda engine: Recorder(engine, sent)).digest == found.digest
    assert len(sent) == 3 * 4 and len(held) == 2 * len(sent)
    rows = {row.numpy().tobytes() for some in held for row in some}
    assert len(rows) >= 3 * 40
    letters = b"".join(codec.encode(up) for up in sent)
    leaked = sum(row in letters for row in rows)
    assert leaked == (0 if local_clusters else len(rows))
    for up in sent:
        assert set(up) <= {"model", "loss", "centroids", "anonymity"}
        assert not {k for k in up.get("model", {}) if "memory" in k or "recent" in k}
    assert all(set(state) == set() for state in found.states.values())
    kind = found.method.exchanges()["train"].up["centroids"].kind
    assert kind == ("statistic" if local_clusters else "per_example")


def test_messages_are_no_larger_than_published() -> None:
    """Two networks of 11,694,144 parameters, a head of 2,052, eight centroids; no memory."""
    words = ["data=cifar10", "encoder=resnet18", "encoder.norm=batch", "method.clusters=64"]
    method = Recipe.of("orchestra", *words).known_method()
    made = card(method)
    buffers = sum(b.numel() * b.element_size() for b in method.blueprint.buffers())
    nets = 4 * (2 * 11_694_144 + 2_052) + buffers
    assert made.bytes["train"]["down"] == nets
    assert made.bytes["train"]["up"] == nets + 2 * 8  # loss and anonymity
    found = trial()
    width = found.method.blueprint["rotation"].in_features
    for entry in entries(found, "train"):
        assert entry["up"]["centroids"] <= 3 * width * 4  # type: ignore[operator]
        assert entry["down"]["centroids"] == 8 * width * 4  # type: ignore[operator]
    assert not any("memory" in key for key in method.blueprint.state_dict())


# ---- rounds --------------------------------------------------------------------------------------


def test_clients_cluster_before_the_first_round_and_nothing_moves() -> None:
    found = trial()
    first = entries(found, "cluster")
    assert [entry["client"] for entry in first] == [0, 1, 2, 3]
    assert all(
        entry["round"] == 0 and set(entry["up"]) == {*orchestra.CLUSTERED} for entry in first
    )
    method, client = found.method, client_of(found)
    start = method.blueprint.shared()
    before = {key: value.clone() for key, value in start.items()}
    pulled = method.blueprint.copy_from(start)
    up = method.cluster(client, SimpleNamespace(model=start))  # type: ignore[attr-defined]
    assert set(up) == {*orchestra.CLUSTERED} and client.state == {}
    assert all(torch.equal(start[key], before[key]) for key in before)
    same = pulled.state_dict()
    assert all(torch.equal(same[key], v) for key, v in method.blueprint.state_dict().items())
    norms = torch.as_tensor(up["centroids"]).norm(dim=1)
    torch.testing.assert_close(norms, torch.ones_like(norms))


def test_the_server_clusters_the_centroids_of_those_who_answered() -> None:
    found, sent = trial(), list[Any]()
    found.again(wrap=lambda engine: Recorder(engine, sent))
    memory = found.server.memory
    assert memory["centroids"].shape == (8, 16)
    torch.testing.assert_close(memory["centroids"].norm(dim=1), torch.ones(8))
    last = [up for up in sent if "model" in up][-4:]
    assert memory["anonymity"] == min(up["anonymity"] for up in last)
    method, server = found.method, replace(found.server, round=3)
    plan = method.round(server, [0, 1])
    ask = next(plan)
    assert ask.step == "train" and ask.down["centroids"] is server.memory["centroids"]
    rows = torch.cat([up["centroids"] for up in last])
    sent = {0: rows[:5], 1: rows[5:], 2: rows[:0]}
    got = SimpleNamespace(
        ids=[0, 1, 2], model=server.model, centroids=sent, anonymity={0: 0, 1: 7, 2: 5}
    )
    with pytest.raises(StopIteration) as stop:
        plan.send(got)
    after = stop.value.value
    wanted = global_clustering(rows, server.memory["centroids"], "soft", 9)
    torch.testing.assert_close(after.memory["centroids"], wanted)
    assert after.memory["anonymity"] == 5  # the smallest of those who sent any
    assert method.noted(after) == {"anonymity": 5}


def test_without_clusters_it_is_rotation_prediction() -> None:
    """X13, bit for bit: the target stands beside and changes nothing."""
    loss = {"name": "assignments", "cluster_weight": 0, "target_view": "raw", "augment": False}
    ours = trial(objective=loss).server.model
    turns = {"name": "rotation", "turns": "one", "head": "projector", "bias": False}
    plain = first_trial("orchestra", method="fedavg", objective=turns).server.model
    assert {key for key in ours if not key.startswith("target.")} == set(plain)
    assert all(torch.equal(ours[key], plain[key]) for key in plain)
    other = trial(objective={**loss, "cluster_weight": 0.1}).server.model
    assert not all(torch.equal(other[key], plain[key]) for key in plain)


def test_a_local_target_stays_at_its_client_and_is_no_part_of_messages() -> None:
    found = trial(objective={"name": "assignments", "target": "local"})
    assert not any(key.startswith("target.") for key in found.server.model)
    for state in found.states.values():
        assert all(key.startswith("target.") for key in state["parts"])
    method, client = found.method, client_of(found)
    parts = method.pull(client, found.server.model)
    for key, value in parts["target"]["encoder"].named_parameters():  # type: ignore[index]
        assert torch.equal(value, dict(parts["encoder"].named_parameters())[key])


@pytest.mark.parametrize("evaluated", ["online", "target"])
def test_either_network_can_be_judged(evaluated: str) -> None:
    found = trial({"evaluated": evaluated})
    parts = found.method.blueprint.copy_from(found.server.model).eval()
    target: Any = parts["target"]
    wanted: nn.Module = parts["encoder"] if evaluated == "online" else target["encoder"]
    images = torch.randn(2, 3, 12, 12)
    judged = found.method.represent(found.server)
    torch.testing.assert_close(judged(images), wanted(images))
    other = target["encoder"] if evaluated == "online" else parts["encoder"]
    assert not torch.allclose(judged(images), other(images))


# ---- anonymity -----------------------------------------------------------------------------------


def test_a_client_with_too_few_images_keeps_its_centroids_back_and_says_so() -> None:
    unequal = {"name": "quantity", "min_size": 4}
    found = trial({"k_min": 10}, split=unequal)
    sizes = found.server.examples
    assert {size < 10 for size in sizes.values()} == {True, False}
    for step in ("cluster", "train"):
        for entry in entries(found, step):
            back = sizes[entry["client"]] < 10
            assert (entry["up"]["centroids"] == 0) == back
            assert ("kept its centroids back" in entry.get("note", "")) == back
            assert entry["outcome"] == "answered"  # its model counts all the same
    assert found.server.memory["anonymity"] >= 10


def test_where_all_keep_theirs_back_centroids_stay_as_they_are() -> None:
    found = trial()
    server = replace(found.server, round=3)
    plan = found.method.round(server, [0])
    next(plan)
    got = SimpleNamespace(
        ids=[0], model=server.model, centroids={0: torch.zeros(0, 16)}, anonymity={0: 0}
    )
    with pytest.raises(StopIteration) as stop:
        plan.send(got)
    held, after = server.memory["centroids"], stop.value.value.memory
    torch.testing.assert_close(after["centroids"], held)
    assert server.memory["anonymity"] > 0 and after["anonymity"] == 0


@pytest.mark.parametrize("images", [2, 3, 5])
def test_clients_smaller_than_the_number_of_clusters_work(images: int) -> None:
    found = trial({"local_clusters": 8})
    client = client_of(found, images=images)
    got = {"model": found.server.model, "centroids": found.server.memory["centroids"]}
    up = found.method.train(client, SimpleNamespace(**got))
    assert len(up["centroids"]) == images // 2 and up["anonymity"] >= 2  # type: ignore[arg-type, operator]
    lonely = client_of(found, images=1)
    with pytest.raises(Decline, match="1 example"):
        found.method.cluster(lonely, SimpleNamespace(model=found.server.model))  # type: ignore[attr-defined]


def test_a_memory_of_views_counts_images() -> None:
    """Twelve epochs over six images fill it many times; k is of images, not of rows."""
    found = trial({"k_min": 1, "local_clusters": 2})
    client = client_of(found, images=6)
    got = {"model": found.server.model, "centroids": found.server.memory["centroids"]}
    for distinct, least, most in ((True, 3, 3), (False, 1, 6)):
        local = replace(found.method.local, epochs=12)
        method = replace(found.method, local=local, distinct=distinct)
        up = method.train(client, SimpleNamespace(**got))
        assert least <= up["anonymity"] <= most  # type: ignore[operator]


def test_released_clusters_tell_the_k_they_gave_and_are_held_to_it() -> None:
    found, sent = trial({"balance": "argmax", "k_min": 1, "local_clusters": 4}), list[Any]()
    found.again(wrap=lambda engine: Recorder(engine, sent))
    told = [up["anonymity"] for up in sent]
    assert 1 <= min(filter(None, told)) < 3  # of equal size they would have three images each
    strict = replace(found.method, k_min=3)
    got = {"model": found.server.model, "centroids": found.server.memory["centroids"]}
    for number in range(4):
        up = strict.train(client_of(found, number), SimpleNamespace(**got))
        kept = len(up["centroids"]) == 0  # type: ignore[arg-type]
        assert up["anonymity"] >= 3 or (kept and up["anonymity"] == 0)  # type: ignore[operator]


def test_the_log_and_the_terminal_show_the_smallest_cluster(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from harmonium.cli.terminal import show_result

    words = ["data=shapes", "data.count=80", "data.test_count=10", "data.size=12", "clients=3"]
    words += ["encoder=cnn-small", "encoder.width=4", "encoder.out=16", "rounds=1"]
    words += ["method.clusters=8", "method.global_steps=9", "evaluate.k=5", "engine.workers=0"]
    found = run("orchestra", *words, "evaluate.health=16", out=tmp_path / "run")
    told = found.rounds[1]["reported"]["anonymity"]
    assert told >= 2 and isinstance(told, int)
    show_result(found, as_json=False)
    said = capsys.readouterr()
    assert f"at least {told} images" in said.out + said.err


# ---- private clusters ----------------------------------------------------------------------------


def test_private_centroids_are_guarded_recorded_and_made_before_training() -> None:
    found = trial({"epsilon": 1.0})
    for step in ("cluster", "train"):
        declared = found.method.exchanges()[step].up["centroids"]
        assert declared.guarded and declared.kind == "statistic"
        for entry in entries(found, step):
            mechanisms = {release["mechanism"] for release in entry["releases"]}
            assert mechanisms == {"gaussian", "discrete-laplace"}
            assert {release["field"] for release in entry["releases"]} == {"centroids"}
            assert "note" not in entry
    assert "centroids statistic with noise" in card(found.method).text()
    method, client = found.method, client_of(found)
    got = {"model": found.server.model, "centroids": found.server.memory["centroids"]}
    up = method.train(client, SimpleNamespace(**got))
    again = client_of(found)
    parts = method.pull(again, found.server.model)
    wanted = method.private_local_centroids(again, parts)  # type: ignore[attr-defined]
    torch.testing.assert_close(up["centroids"], wanted["centroids"])
    norms = torch.as_tensor(up["centroids"]).norm(dim=1)
    torch.testing.assert_close(norms, torch.ones_like(norms))
    assert up["anonymity"] == 0


def test_a_private_row_is_a_function_of_its_own_image(monkeypatch: pytest.MonkeyPatch) -> None:
    found, rows = trial({"epsilon": 1.0}), list[Tensor]()
    inner = orchestra.private_centroids

    def watched(given: Tensor, *rest: Any, **more: Any) -> Any:
        rows.append(given)
        return inner(given, *rest, **more)

    monkeypatch.setattr(orchestra, "private_centroids", watched)
    for images in (9, 4):
        client = client_of(found, images=images)
        parts = found.method.pull(client, found.server.model)
        found.method.private_local_centroids(client, parts)  # type: ignore[attr-defined]
    torch.testing.assert_close(rows[0][:4], rows[1])
    assert len(rows[0]) == 9


# ---- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"clusters": 1}, "method.clusters is 1"),
        ({"k_min": 0}, "method.k_min is 0"),
        ({"local_clusters": 0}, "rows of single images: to allow that, set method.k_min=1"),
        ({"epsilon": 0.0}, "method.epsilon is 0.0"),
        ({"clusters": 13}, "4 clients send at most 12 centroids"),
        ({"k_min": 65}, "at most 4 centroids in a round .1 each, of method.k_min=65"),
        ({"k_min": 129}, "send at most 0 centroids"),
        ({"k_min": 60, "clusters": 4}, "no client has 60 images for a cluster"),
        ({"epsilon": 1.0, "delta": 2.0}, "method.delta is 2.0"),
        ({"evaluated": "target"}, "need a target that the server knows"),
    ],
)
def test_wrong_settings_are_refused(method: dict[str, Any], message: str) -> None:
    target = {"name": "assignments", "target": "local"}
    more = {"objective": target} if "evaluated" in method else {}
    with pytest.raises(ConfigError, match=message):
        trial(method, **more)


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ({"k_min": 5}, "each of the projections of at least 5 images"),
        ({"epsilon": 2.0}, "with noise leave, at an epsilon of 2 each time"),
        ({"local_clusters": 0, "k_min": 1}, "Projections of single images leave"),
    ],
)
def test_the_card_says_what_leaves(method: dict[str, Any], said: str) -> None:
    words = [f"method.{name}={value}" for name, value in method.items()]
    made = Recipe.of("orchestra", "data=cifar10", *words).known_method()
    assert said in card(made).text()


def test_it_needs_its_objective() -> None:
    with pytest.raises(ConfigError, match="set objective=assignments"):
        trial(objective="rotation")


def test_it_passes_the_contract_with_other_options() -> None:
    more = {"balance": "argmax", "distinct": False, "k_min": 1, "global_balance": "exact"}
    loss = {"name": "assignments", "target": "local", "extra_forward": True, "update": "after"}
    assert check_method("orchestra", method={**SMALL, **more}, objective=loss)
