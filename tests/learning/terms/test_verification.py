"""User verification: the equations, what a client may change, and what the bounds say."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from harmonium.core import seeds
from harmonium.core.errors import ConfigError
from harmonium.federation.card import card
from harmonium.federation.method import Server
from harmonium.federation.server_optimisers import Average
from harmonium.learning.client import Batch, Client, Examples
from harmonium.learning.context import Context
from harmonium.learning.objectives.infonce import info_nce
from harmonium.learning.terms.verification import TABLE, Verification, bounds, verification
from harmonium.privacy.mechanisms import Noise
from harmonium.recipe.schema import Recipe
from harmonium.testing import TINY, Trial, check_method, first_trial

UV: dict[str, Any] = {"terms": {"uv": {}}, "objective": {"name": "infonce", "norm": "none"}}
ADAM = {"name": "adam", "weighting": "uniform"}


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def by_definition(inputs: Tensor, table: Tensor, me: int, scale: float) -> float:
    """Minus the mean of log r(s | z), number by number."""
    total = 0.0
    for a in inputs:
        logits = [scale * float(a @ w / a.norm() / w.norm()) for w in table]
        total += math.log(sum(map(math.exp, logits))) - logits[me]
    return total / len(inputs)


@pytest.mark.parametrize("scale", [1.0, 10.0])
@pytest.mark.parametrize(("n", "clients"), [(1, 1), (1, 2), (5, 7)])
def test_the_cost_is_that_of_a_softmax_over_cosines(n: int, clients: int, scale: float) -> None:
    inputs, table = rows(n, 4), rows(clients, 4, seed=1)
    found = verification(inputs, table, clients - 1, scale).item()
    assert found == pytest.approx(by_definition(inputs, table, clients - 1, scale))
    assert verification(3 * inputs, 0.1 * table, 0, scale).item() == pytest.approx(
        verification(inputs, table, 0, scale).item()
    )


def test_gradients_are_right() -> None:
    inputs, table = rows(3, 4).requires_grad_(), rows(5, 4, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, w: verification(a, w, 2, 3.0), (inputs, table))


@pytest.mark.parametrize(("clients", "best"), [(10, -1.377), (100, -3.612), (500, -5.216)])
def test_without_a_scale_the_client_part_of_the_bound_cannot_be_positive(
    clients: int, best: float
) -> None:
    """The best rows point to the corners of a simplex, every input to its own."""
    simplex = torch.eye(clients, dtype=torch.float64) - 1 / clients
    cost = verification(simplex[:1], simplex, 0).item()
    assert -cost == pytest.approx(best, abs=1e-3)
    least = bounds({"first": cost, "second": cost, "local": 0.0}, math.log(clients))
    assert least["total"] < 0
    sharp = verification(simplex[:1], simplex, 0, scale=10.0).item()
    assert sharp < 0.05 * cost


def trial(**settings: Any) -> Trial:
    return first_trial("fedavg", **{**UV, **settings})


def seen_by(trial: Trial, client: int = 1) -> tuple[Any, Any, Any, Context]:
    """A model as received, and one client's batch as it sees it."""
    rng = seeds.torch_rng(0, "test")
    examples = Examples(trial.dataset.train, trial.split.indices[client])
    method = trial.method
    at = Client(client, 1, 2, examples, method.views, rng, Noise("simulated", rng))
    parts = method.pull(at, trial.server.model)
    batch = Batch(torch.arange(len(examples)), examples, method.views, rng)
    return at, parts, method.see(parts, batch), Context(me=client, anchor=trial.server.model)


def test_the_term_sums_the_cost_of_two_views_and_does_not_mind_their_order() -> None:
    found = trial()
    _, parts, seen, context = seen_by(found)
    term = found.method.terms[0]
    table, u = found.server.model[TABLE], parts["uv_projector"]
    costs = [by_definition(u(h).detach(), table, 1, 1.0) for h in seen.h]
    assert term.score(parts, seen, context).item() == pytest.approx(sum(costs), rel=1e-5)
    swapped = replace(seen, h=seen.h[::-1])
    torch.testing.assert_close(
        term.score(parts, swapped, context), term.score(parts, seen, context), rtol=1e-6, atol=0
    )
    half = replace(term, weight=0.5)
    assert half.score(parts, seen, context).item() == pytest.approx(sum(costs) / 2, rel=1e-5)


def test_only_the_own_row_has_a_gradient_and_there_is_no_bias() -> None:
    found = trial()
    _, parts, seen, context = seen_by(found)
    found.method.terms[0].score(parts, seen, context).backward()
    gradient = parts["uv"].weight.grad
    assert gradient[1].abs().sum() > 0
    assert gradient[[0, 2, 3]].abs().sum() == 0
    assert [name for name, _ in parts["uv"].named_parameters()] == ["weight"]
    assert seen.h[0].grad_fn is not None and parts["encoder"][0].weight.grad.abs().sum() > 0


@pytest.mark.parametrize("local", [{"momentum": 0.9, "weight_decay": 0.1}, {"optimiser": "adam"}])
def test_a_client_changes_its_own_row_and_keeps_all_at_unit_length(local: dict[str, Any]) -> None:
    found = trial(local={"epochs": 2, "batch": 6, "lr": 0.1, **local})
    at, parts, _, context = seen_by(found)
    found.method.fit(parts, at, context=context)
    before, after = found.server.model[TABLE], parts["uv"].weight.detach()
    assert torch.equal(after[[0, 2, 3]], before[[0, 2, 3]])
    assert not torch.equal(after[1], before[1])
    torch.testing.assert_close(after.norm(dim=1), torch.ones(4), rtol=1e-6, atol=1e-6)


def test_numbering_clients_otherwise_numbers_the_rows_otherwise() -> None:
    inputs, table, order = rows(3, 4), rows(5, 4, seed=1), torch.tensor([3, 0, 4, 1, 2])
    here, there = verification(inputs, table, 0), verification(inputs, table[order], 1)
    assert here.item() == pytest.approx(there.item())


@pytest.mark.parametrize("objective", ["infonce", "spectral", "simsiam", "byol"])
def test_without_weight_it_is_the_plain_objective(objective: str) -> None:
    """X4: Federated SimCLR with beta = 0 is local SimCLR, bit for bit."""
    settings: dict[str, Any] = {"objective": objective, "server": ADAM}
    plain = trial(terms=None, **settings)
    off = trial(terms={"uv": {"weight": 0.0}}, **settings)
    assert all(
        torch.equal(value, off.server.model[key]) for key, value in plain.server.model.items()
    )
    on = trial(**settings)
    assert not torch.equal(
        on.server.model["encoder.0.weight"], plain.server.model["encoder.0.weight"]
    )
    extra = {key.partition(".")[0] for key in set(off.server.model) - set(plain.server.model)}
    assert extra == {"uv", "uv_projector"}
    for key in set(off.server.model) - set(plain.server.model):
        torch.testing.assert_close(off.server.model[key], off.method.blueprint.shared()[key])


def test_all_rows_go_down_and_the_own_row_comes_up() -> None:
    """Key sets and bytes of a message, as the card of the method has them."""
    found = trial(terms={"uv": {"out": 8}})
    entries = [json.loads(line) for line in found.lines]
    assert {entry["step"] for entry in entries} == {"train", "gauge"}
    expected = card(found.method).bytes["train"]
    for entry in (entry for entry in entries if entry["step"] == "train"):
        assert sum(entry["down"].values()) == expected["down"]
        assert sum(entry["up"].values()) == expected["up"]
    model = found.method.blueprint.layouts()["model"]
    assert {key.partition(".")[0] for key in model} == {
        "encoder",
        "projector",
        "uv_projector",
        "uv",
    }
    assert model[TABLE].rule == "row" and model[TABLE].shape == (8,)
    assert not any("running" in key for key in model)  # GroupNorm has no buffers to send


def test_bytes_are_those_of_the_paper() -> None:
    """ResNet-18 with GroupNorm on 100 clients: card A1.5's numbers."""

    def sent(*changes: str) -> dict[str, int]:
        words = ["data=cifar10", "encoder=resnet18", "objective.hidden=2048"]
        recipe = Recipe.of("fsimclr", *words, *changes)
        return card(recipe.known_method()).bytes["train"]

    both = sent("clients=100", "terms.uv.hidden=2048")
    assert both["down"] == 49_926_912 + 5_251_584 + 51_200
    assert both["up"] == 49_926_912 + 5_251_584 + 512 + 8  # and the loss
    assert sent("terms=null")["down"] == 49_926_912
    assert sent("clients=500", "terms.uv.hidden=2048")["down"] == 49_926_912 + 5_251_584 + 256_000
    simsiam = ["objective=simsiam", "objective.layers=2"]
    sizes = ["objective.out=128", "objective.predictor_hidden=2048", "objective.norm=none"]
    guessing = sent(
        *simsiam, *sizes, "objective.out_norm=false", "objective.bias=true", "terms=null"
    )
    assert guessing["down"] == 49_926_912 + 4 * 526_464


@pytest.mark.parametrize("rows", ["dense", "lazy"])
def test_the_server_moves_rows_as_an_average_of_whole_tables_would(rows: str) -> None:
    """By hand: Adam on the mean gap of whole tables, in which only own rows have changed."""
    recipe = Recipe.from_tree({**TINY, **UV, "terms": {"uv": {"rows": rows}}, "server": ADAM})
    method = recipe.method_for((12, 12, 3), 8)
    start = method.blueprint.shared()
    server = Server({0: 3, 1: 30, 2: 5, 3: 9}, start, round=1)
    table = start[TABLE].clone()
    first = torch.zeros_like(table)
    second = torch.zeros_like(table)
    steps = torch.zeros(4, 1)
    for number, present in enumerate(([0, 2], [1, 2], [2, 3]), 1):
        uploads = {c: torch.nn.functional.normalize(torch.randn(128), dim=0) for c in present}
        whole = [table.clone() for _ in present]
        for copy, client in zip(whole, present, strict=True):
            copy[client] = uploads[client]
        gap = table - torch.stack(whole).mean(0)
        there = torch.zeros(4, 1, dtype=torch.bool)
        there[present] = True
        moving = there if rows == "lazy" else torch.ones_like(there)
        first = torch.where(moving, 0.9 * first + 0.1 * gap, first)
        second = torch.where(moving, 0.999 * second + 0.001 * gap**2, second)
        steps = steps + moving.float()
        root = (second / (1 - 0.999**steps)).sqrt() + 1e-8
        step = 1e-3 * first / (1 - 0.9**steps) / root
        table = torch.nn.functional.normalize(torch.where(moving, table - step, table))
        server = method.merge(replace(server, round=number), {TABLE: uploads})
        torch.testing.assert_close(server.model[TABLE], table, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(server.model[TABLE].norm(dim=1), torch.ones(4))


def test_rows_of_absent_clients_rest_only_if_lazy() -> None:
    moved = {}
    for rows in ("dense", "lazy"):
        recipe = Recipe.from_tree({**TINY, **UV, "terms": {"uv": {"rows": rows}}, "server": ADAM})
        method = recipe.method_for((12, 12, 3), 8)
        server = Server(dict.fromkeys(range(4), 5), method.blueprint.shared(), round=1)
        for present in ({0: 1}, {1: 1}):
            before = server.model[TABLE]
            uploads = {c: -before[c] + before[c + 1] for c in present}
            server = method.merge(server, {TABLE: uploads})
        moved[rows] = not torch.allclose(server.model[TABLE][0], before[0], atol=1e-7)
    assert moved == {"dense": True, "lazy": False}


def test_nothing_new_leaves_a_fresh_server_where_it_is() -> None:
    method = trial(server=ADAM).method
    start = method.blueprint.shared()
    folded: dict[str, Any] = {key: value for key, value in start.items() if key != TABLE}
    folded[TABLE] = dict(enumerate(start[TABLE]))
    after = method.merge(Server(dict.fromkeys(range(4), 5), start, round=1), folded).model
    for key, value in start.items():
        torch.testing.assert_close(after[key], value, rtol=1e-6, atol=1e-7)


# ---- bounds --------------------------------------------------------------------------------------


def test_bounds_are_the_equations_and_are_not_clipped() -> None:
    means = {"first": 3.0, "second": 2.0, "local": 1.5}
    found = bounds(means, entropy=1.0)
    assert found["local"] == 1.5  # proposition 1
    assert found["client"] == pytest.approx(1.0 - 2.5)  # lemma 2.1, mean of the views
    assert found["total"] == pytest.approx(1.5 - 5.0 + 1.0)  # eq. 6
    assert found["labels"] == pytest.approx(2.0 - 5.0)  # proposition 2
    assert "local" not in bounds({"first": 1.0, "second": 1.0}, 1.0)


def test_a_run_reports_bounds_of_the_model_that_is_judged() -> None:
    found = trial(objective={"name": "infonce", "norm": "none"})
    report = found.method.report(found.server)["bounds"]
    sizes = [found.server.examples[c] for c in found.server.everyone]
    shares = [size / sum(sizes) for size in sizes]
    entropy = -sum(share * math.log(share) for share in shares)
    assert report["entropy"] == pytest.approx(entropy)
    assert (report["clients"], report["of"], report["oldest"], report["scale"]) == (4, 4, 0, 1.0)
    assert report["local"] <= math.log(found.recipe.local.batch)
    assert report["total"] <= math.log(found.recipe.local.batch) + entropy
    # A table that cannot tell clients apart: every cost is log 4, and the client bound at most 0.
    blank = {**found.server.model, TABLE: torch.ones(4, 128)}
    at, *_ = seen_by(found)
    first, second, _ = found.method.gauge(at, SimpleNamespace(model=blank))["measured"].tolist()
    assert first == pytest.approx(math.log(4), rel=1e-5) == second


def test_bounds_keep_their_age_and_say_whose_are_missing() -> None:
    held = trial(participation={"number": 2}, rounds=2)
    report = held.method.report(held.server)["bounds"]
    assert report["clients"] == 2 and report["of"] == 4 and report["oldest"] == 0
    method, server = held.method, held.server
    plan = method.before_evaluation(replace(server, round=9), [3])
    ask = next(plan)
    assert (ask.step, list(ask.to), ask.least) == ("gauge", [3], 0)
    with pytest.raises(StopIteration) as stop:
        plan.send(SimpleNamespace(ids=[3], measured={3: torch.tensor([9.0, 9.0, 9.0])}))
    later = method.report(stop.value.value)["bounds"]
    assert later["oldest"] == 7 and later["clients"] in (2, 3)
    plan = method.before_evaluation(server, [0])
    next(plan)
    with pytest.raises(StopIteration) as stop:  # nobody answers: what was known stays
        plan.send(SimpleNamespace(ids=[], measured={}))
    assert stop.value.value is server


def test_clients_count_by_their_images_unless_all_alike() -> None:
    found = trial()
    held = {
        "rounds": torch.tensor([2, 2, -1, 1]),
        "values": torch.tensor([[1.0, 1, 1], [2, 2, 2], [99, 99, 99], [6, 6, 6]]).double(),
    }
    server = replace(
        found.server, round=2, examples={0: 10, 1: 30, 2: 50, 3: 10}, memory={"measured": held}
    )
    report = found.method.report(server)["bounds"]
    assert report["local"] == pytest.approx((10 * 1 + 30 * 2 + 10 * 6) / 50)
    shares = [0.1, 0.3, 0.5, 0.1]  # of the whole federation, whoever has measured
    assert report["entropy"] == pytest.approx(-sum(p * math.log(p) for p in shares))
    assert (report["clients"], report["of"], report["oldest"]) == (3, 4, 1)
    alike = replace(found.method, server_optimiser=Average(weighting="uniform"))
    even = alike.report(server)["bounds"]
    assert even["local"] == pytest.approx(3.0) and even["entropy"] == pytest.approx(math.log(4))


def test_the_model_is_measured_in_evaluation_mode_image_by_image() -> None:
    """BatchNorm keeps to its statistics; a smaller last batch counts by its images."""
    found = trial(
        objective={"name": "infonce", "norm": "batch"}, local={"epochs": 1, "batch": 5, "lr": 0.1}
    )
    method = found.method
    client, *_ = seen_by(found, 2)
    count = len(client.examples)
    assert count % 5 > 1  # a last, smaller batch
    got = method.gauge(client, SimpleNamespace(model=found.server.model))["measured"]
    client, *_ = seen_by(found, 2)
    parts = method.pull(client, found.server.model).eval()
    total = torch.zeros(3, dtype=torch.float64)
    for batch in client.batches(1, 5):
        with torch.no_grad():
            seen = method.see(parts, batch)
            table = found.server.model[TABLE]
            costs = [verification(parts["uv_projector"](h), table, 2) for h in seen.h]
            local = math.log(len(batch.index)) - info_nce(*seen.pair(), 0.5)
        total += len(batch.index) * torch.stack([*costs, local]).double()
    torch.testing.assert_close(got, total / count, rtol=1e-5, atol=1e-6)


def test_other_objectives_report_the_client_parts_only() -> None:
    found = trial(objective="simsiam", terms={"uv": {"scale": 7.0}})
    report = found.method.report(found.server)["bounds"]
    assert report["scale"] == 7.0
    assert "local" not in report and "total" not in report and "labels" in report


# ---- where it may be used ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": "rotation"}, "objective=rotation"),
        ({"objective": "autoencoder"}, "objective=autoencoder"),
        ({"terms": {"uv": {"pictures": "unlabelled"}}}, "reads labels"),
        ({"terms": {"uv": {"scale": 0.0}}}, "terms.uv.scale is 0"),
        ({"terms": {"uv": {"weight": -1.0}}}, "terms.uv.weight is -1"),
        ({"terms": {"uv": {"hidden": 0}}}, "terms.uv.hidden is 0"),
    ],
)
def test_what_cannot_be_right_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Recipe.from_tree({**TINY, **UV, **settings})


def test_a_warning_is_due_where_moments_move_rows_of_absent_clients() -> None:
    method = trial(server=ADAM).method
    term = method.terms[0]
    assert "2 of 4 clients" in term.note(method, 2) and "lazy" in term.note(method, 2)
    assert not term.note(method, 4) and not Verification(rows="lazy").note(method, 2)
    assert not term.note(trial().method, 2)  # a plain average has no moments


@pytest.mark.parametrize("objective", ["infonce", "spectral", "simsiam", "byol", "moco", "swav"])
def test_it_joins_every_objective_of_two_views(objective: str) -> None:
    small = {"moco": {"queue": 32}, "swav": {"prototypes": 8, "queue": 24, "freeze": 2}}
    found = trial(objective={"name": objective, **small.get(objective, {})})
    start = found.method.blueprint.shared()
    for key in (TABLE, "uv_projector.0.weight"):
        assert not torch.equal(start[key], found.server.model[key])


def test_federated_simclr_passes_the_contract() -> None:
    check_method("fsimclr", participation={"number": 3})
