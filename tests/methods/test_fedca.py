"""FedCA: the dictionary, the moving average and the alignment, equation by equation."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from harmonium.core import seeds
from harmonium.core.errors import ConfigError, NotEnoughReplies
from harmonium.federation.card import card
from harmonium.federation.method import Method
from harmonium.learning.client import Batch, Client, Decline, Examples
from harmonium.learning.objectives.infonce import info_nce
from harmonium.learning.training import Local
from harmonium.methods.fedca import DictionaryAndTargets
from harmonium.methods.fedca.alignment import alignment_batches
from harmonium.methods.fedca.dictionary import build_dictionary, grouped_means, quotas
from harmonium.privacy.mechanisms import Noise
from harmonium.recipe.schema import Recipe
from harmonium.testing import TINY, Trial, check_method, first_trial

PUBLIC = {"name": "shapes", "count": 30, "test_count": 4, "size": 12}
SMALL: dict[str, Any] = {"name": "fedca", "size": 16, "align_epochs": 2, "align_batch": 8}


def trial(method: dict[str, Any] | None = None, **changes: Any) -> Trial:
    chosen = {**SMALL, **(method or {})}
    return first_trial("fedca", public=PUBLIC, **{"method": chosen, **changes})


def client_of(found: Trial, number: int = 0) -> Client:
    rng = seeds.torch_rng(0, "test", number)
    examples = Examples(found.dataset.train.without_labels(), found.split.indices[number])
    public = found.server.public
    noise = Noise("simulated", rng)
    state = dict(found.states[number])
    return Client(number, 1, 2, examples, found.method.views, rng, noise, public, state)


def test_without_dictionary_and_alignment_it_is_fedavg_with_infonce() -> None:
    """X6, bit for bit."""
    off = trial({"size": 0, "strength": 0.0})
    plain = first_trial("fedca", method="fedavg", public=None)
    assert plain.server.model.keys() == off.server.model.keys()
    assert all(torch.equal(plain.server.model[k], off.server.model[k]) for k in plain.server.model)
    for more in ({"size": 16, "strength": 0.0}, {"size": 0}):
        other = trial(more).server.model
        assert not all(torch.equal(plain.server.model[k], other[k]) for k in other)


def seen_by(found: Trial) -> tuple[Any, Any]:
    client = client_of(found)
    parts = found.method.pull(client, found.server.model)
    batch = Batch(torch.arange(6), client.examples, client.views, client.rng)
    return parts, found.method.see(parts, batch)


def context_of(
    negatives: Tensor | None, targets: Any = None, weighed: list[Any] | None = None
) -> DictionaryAndTargets:
    def record_terms(alignment: Tensor, contrast: Tensor) -> None:
        if weighed is not None:
            weighed.append((alignment.item(), contrast.item()))

    batches = targets or iter(())
    return DictionaryAndTargets(
        me=0, negatives=negatives, alignment_batches=batches, record_terms=record_terms
    )


def test_the_loss_is_that_of_n_plus_k_classes() -> None:
    found = trial({"strength": 0.0})
    parts, seen = seen_by(found)
    dictionary = functional.normalize(torch.randn(5, 128)).requires_grad_()
    context = context_of(dictionary)
    loss = found.method.score(parts, seen, context)
    first, second = (functional.normalize(z) for z in seen.pair())
    logits = torch.cat([first @ second.T, first @ dictionary.detach().T], 1) / 0.1
    assert logits.shape == (6, 6 + 5)
    wanted = -logits.log_softmax(1).diagonal().mean()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    loss.backward()
    assert dictionary.grad is None
    order = torch.tensor([3, 1, 4, 0, 2])
    shuffled = found.method.score(parts, seen, context_of(dictionary[order]))
    assert shuffled.item() == pytest.approx(loss.item(), rel=1e-6)
    empty = found.method.score(parts, seen, context_of(None))
    alone = -(first @ second.T / 0.1).log_softmax(1).diagonal().mean()
    assert empty.item() == pytest.approx(alone.item(), rel=1e-5)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_alignment_is_a_squared_distance_and_vanishes_at_the_targets(reduction: str) -> None:
    found = trial({"strength": 0.3, "reduction": reduction})
    parts, seen = seen_by(found)
    method, weighed = found.method, list[tuple[float, float]]()
    images = torch.randn(4, 3, 12, 12)
    with torch.no_grad():
        own = parts["encoder"](images)
        h, z = own + 0.5, parts["projector"](own) - 0.25
    apart = method.score(parts, seen, context_of(None, iter([(images, h, z)]), weighed))
    plain = replace(method, strength=0.0).score(parts, seen, context_of(None))
    wanted = 4 * (own.shape[1] * 0.25 + 128 * 0.0625) / (4 if reduction == "mean" else 1)
    assert apart.item() - plain.item() == pytest.approx(0.3 * wanted, rel=1e-4)
    assert weighed == [pytest.approx((0.3 * wanted, plain.item()), rel=1e-4)]
    there = iter([(images, own, parts["projector"](own).detach())])
    none = method.score(parts, seen, context_of(None, there, weighed))
    assert none.item() == pytest.approx(plain.item(), abs=1e-6)


BATCHED = {
    "encoder": {"name": "cnn-small", "width": 4, "norm": "batch", "out": 16},
    "objective": {"name": "infonce", "anchors": "first", "norm": "batch"},
}


def test_a_model_is_at_no_distance_from_itself_and_public_images_move_no_statistics() -> None:
    """Targets and features in one BatchNorm mode: theta = theta_a gives 0 (eq. 11 to 13)."""
    found = trial({"strength": 1.0}, **BATCHED)
    method, parts = found.method, found.method.blueprint.copy_from(found.server.model)
    client = client_of(found)
    batch = Batch(torch.arange(6), client.examples, client.views, client.rng)
    seen = method.see(parts.train(), batch)  # which moves statistics, as training does
    parts.eval()
    public = client.views.plain(torch.from_numpy(client.public.batch(np.arange(8)).copy()))  # type: ignore[union-attr]
    with torch.no_grad():
        h = parts["encoder"](public)
        z = parts["projector"](h)
    parts.train()
    before = {key: value.clone() for key, value in parts.named_buffers()}
    weighed = list[tuple[float, float]]()
    method.score(parts, seen, context_of(None, iter([(public, h, z)]), weighed))
    assert weighed[0][0] == pytest.approx(0, abs=1e-8)
    assert before and all(torch.equal(before[k], v) for k, v in parts.named_buffers())
    assert all(module.training for module in parts.modules())
    bare = replace(method, strength=0.0)  # type: ignore[call-arg]
    pull = method.score(parts, seen, context_of(None, iter([(public, h + 1, z)]), weighed))
    (pull - bare.score(parts, seen, context_of(None))).backward()  # type: ignore[no-untyped-call]
    first = next(parts["encoder"].parameters()).grad
    assert (
        first is not None and first.abs().max() > 1e-4
    )  # in evaluation mode it learns all the same


def test_statistics_that_are_never_sent_are_measured_before_alignment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = trial({"strength": 0.1, "reduction": "mean"}, batch_norm="recalibrate", **BATCHED)
    client, began = client_of(found), list[Any]()
    plain = Method.fit

    def look(method: Any, parts: Any, client: Any, **how: Any) -> Any:
        began.append({key: value.clone() for key, value in parts.named_buffers()})
        return plain(method, parts, client, **how)

    monkeypatch.setattr(Method, "fit", look)
    got = {"model": found.server.model, "dictionary": torch.zeros(0, 128), "count": 0}
    found.method.train(client, SimpleNamespace(**got))
    parts = found.method.pull(client, found.server.model)
    convolution = next(m for m in parts["encoder"].modules() if isinstance(m, torch.nn.Conv2d))
    inputs = convolution(client.views.plain(client.examples.pixels()))
    means = next(v for k, v in began[0].items() if k.endswith("running_mean"))
    torch.testing.assert_close(means, inputs.mean((0, 2, 3)), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("excluding", [True, False])
def test_a_clients_own_rows_can_be_left_out_of_its_negatives(excluding: bool) -> None:
    """Compared with what each client sent in the round before, row by row."""
    found = trial({"exclude_own": excluding, "size": 24, "strength": 0.0}, rounds=3)
    got, sent = list[dict[int, Tensor]](), list[dict[int, Tensor]]()

    def record(engine: Any) -> Any:
        class Recorder:
            def __getattr__(self, name: str) -> Any:
                return getattr(engine, name)

            def deliver(self, ask: Any, turn: Any) -> Any:
                got.append({c: {**ask.down, **ask.each[c]}["dictionary"] for c in ask.to})
                sent.append({})
                for reply in engine.deliver(ask, turn):
                    sent[-1][reply.client] = reply.up["rows"].clone()
                    yield reply

        return Recorder()

    assert found.again(wrap=record).digest == found.digest
    assert all(len(rows) == 0 for rows in got[0].values())
    for before, now in zip(sent, got[1:], strict=False):
        for client, dictionary in now.items():
            counts = {
                owner: int((dictionary[:, None] == rows[None]).all(2).any(0).sum())
                for owner, rows in before.items()
            }
            wanted = {owner: len(rows) for owner, rows in before.items()}
            assert counts == wanted | ({client: 0} if excluding else {})
    assert ("owners" in found.server.memory) == excluding


def test_targets_are_what_a_model_trained_on_public_images_makes_of_them() -> None:
    found = trial()
    memory, method = found.server.memory, found.method
    assert memory["align_h"].shape == (30 - 3, 16) and memory["align_z"].shape == (27, 128)
    first = method.blueprint.copy_from().eval()
    public = torch.from_numpy(np.array(found.server.public.pixels))  # type: ignore[union-attr]
    with torch.no_grad():
        drawn = first["encoder"](method.views.plain(public))
    assert not torch.allclose(drawn, memory["align_h"])  # it was trained
    for state in found.states.values():
        assert torch.equal(state["align_h"], memory["align_h"])


def test_the_public_model_is_trained_for_its_own_epochs_at_a_constant_rate() -> None:
    found = trial(encoder={"name": "cnn-small", "width": 4, "norm": "batch", "out": 16})
    local = Local(optimiser="adam", lr=0.01, schedule="cosine", warmup=2, batch=16, clip=None)
    method = replace(found.method, align_epochs=3, local=local)
    server = replace(found.server, memory={}, round=0)
    with pytest.raises(StopIteration) as ended:
        next(method.setup(server, [0, 1]))
    memory = ended.value.value.memory
    here, parts = method.at_server(server, "align"), method.blueprint.copy_from().train()
    adam = torch.optim.Adam(parts.parameters(), lr=0.01)
    for batch in here.batches(3, 16):
        adam.zero_grad()
        info_nce(*method.see(parts, batch).pair(), 0.1, anchors="first").backward()
        adam.step()
    parts.eval()
    torch.testing.assert_close(memory["align_h"], here.features(parts["encoder"]))
    z = here.features(lambda x: parts["projector"](parts["encoder"](x)))
    torch.testing.assert_close(memory["align_z"], z)
    assert memory["told"] == []


def test_targets_are_sent_once_and_every_client_gets_the_same_dictionary() -> None:
    found = trial(rounds=3)
    entries = [json.loads(line) for line in found.lines]
    told = [entry["client"] for entry in entries if entry["step"] == "align"]
    assert sorted(told) == [0, 1, 2, 3]
    assert all(entry["round"] == 1 for entry in entries if entry["step"] == "align")
    sent: list[Tensor] = []

    def record(engine: Any) -> Any:
        class Recorder:
            def __getattr__(self, name: str) -> Any:
                return getattr(engine, name)

            def deliver(self, ask: Any, turn: Any) -> Any:
                if ask.step == "train":
                    assert "dictionary" not in {k for each in ask.each.values() for k in each}
                    sent.append(ask.down["dictionary"])
                return engine.deliver(ask, turn)

        return Recorder()

    assert found.again(wrap=record).digest == found.digest
    assert [tuple(one.shape) for one in sent] == [(0, 128), (16, 128), (16, 128)]
    torch.testing.assert_close(sent[1].norm(dim=1), torch.ones(16))


@pytest.mark.parametrize("source", ["trained", "received"])
def test_rows_are_by_the_model_that_source_names(source: str) -> None:
    found = trial({"source": source, "momentum": 0.0})
    client, method = client_of(found, 1), found.method
    got = {"model": found.server.model, "dictionary": torch.zeros(0, 128), "count": 5}
    sent = method.train(client, SimpleNamespace(**got))
    received = method.pull(client, found.server.model).eval()
    z = client.features(lambda x: received["projector"](received["encoder"](x)))
    nearest = (sent["rows"] @ functional.normalize(z).T).max(1).values
    assert torch.allclose(nearest, torch.ones(5), atol=1e-5) == (source == "received")


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_the_average_of_projections_is_equation_9(momentum: float) -> None:
    found = trial({"momentum": momentum})
    client, method = client_of(found, 1), found.method
    held = client.state["ensemble"].clone()
    parts = method.pull(client, found.server.model).eval()
    z = client.features(lambda x: parts["projector"](parts["encoder"](x)))
    rows = method.local_dictionary(client, parts, 5)
    wanted = momentum * held + (1 - momentum) * z
    torch.testing.assert_close(client.state["ensemble"], wanted)
    unit = functional.normalize(wanted)
    nearest = (rows @ unit.T).max(1)
    torch.testing.assert_close(nearest.values, torch.ones(5))
    assert len(set(nearest.indices.tolist())) == 5  # drawn without replacement
    client.state.pop("ensemble")
    method.local_dictionary(client, parts, 1)
    torch.testing.assert_close(client.state["ensemble"], (1 - momentum) * z)  # from zero on


def test_rows_are_made_in_evaluation_mode() -> None:
    found = trial(objective={"name": "infonce", "anchors": "first", "norm": "batch"})
    client, method = client_of(found, 1), replace(found.method, momentum=0.0)
    parts = method.pull(client, found.server.model).train()
    before = {key: value.clone() for key, value in parts.state_dict().items()}
    method.local_dictionary(client, parts, 5)
    assert all(torch.equal(before[key], value) for key, value in parts.state_dict().items())
    parts.eval()
    z = client.features(lambda x: parts["projector"](parts["encoder"](x)), size=3)
    torch.testing.assert_close(client.state["ensemble"], z)


def test_public_images_go_with_their_targets_in_ever_new_orders() -> None:
    found = trial()
    client = client_of(found)
    assert client.public is not None
    count = len(client.public)
    client.state |= {"align_h": torch.arange(count)[:, None], "align_z": -torch.arange(count)}
    batches, seen = alignment_batches(client, 10), list[list[int]]()
    plain = client.views.plain(torch.from_numpy(client.public.batch(np.arange(count)).copy()))
    for _ in range(2):
        passed = list[int]()
        while len(passed) < count:
            images, h, z = next(batches)
            assert len(images) <= 10 and torch.equal(h[:, 0], -z)
            torch.testing.assert_close(images, plain[h[:, 0]])
            passed += h[:, 0].tolist()
        assert sorted(passed) == list(range(count)) != passed
        seen.append(passed)
    assert seen[0] != seen[1]
    with pytest.raises(Decline, match="no public images"):
        next(alignment_batches(replace(client, public=None), 10))


def test_the_ratio_that_is_told_is_of_alignment_to_contrast() -> None:
    found = trial(local={"epochs": 1, "batch": 500})  # a single step
    got = {"model": found.server.model, "dictionary": torch.zeros(0, 128), "count": 0}
    told = found.method.train(client_of(found), SimpleNamespace(**got))
    bare = replace(found.method, strength=0.0).train(client_of(found), SimpleNamespace(**got))
    assert bare["ratio"] == 0
    wanted = float((told["loss"] - bare["loss"]) / bare["loss"])
    assert float(told["ratio"]) == pytest.approx(wanted, rel=1e-4)


def test_clients_that_are_away_keep_their_average() -> None:
    found = trial(participation={"number": 2}, rounds=2)
    took = [json.loads(line) for line in found.lines]
    last = {entry["client"] for entry in took if entry["step"] == "train" and entry["round"] == 2}
    once = {entry["client"] for entry in took if entry["step"] == "train"} - last
    for client in once:  # was there in round 1 alone
        assert "ensemble" in found.states[client]
    assert found.again(reload=True).digest == found.digest


@pytest.mark.parametrize("sampling", ["client", "server", "replace"])
def test_who_chooses_the_rows(sampling: str) -> None:
    found = trial({"sampling": sampling}, participation={"number": 2}, rounds=3)
    entries = [json.loads(line) for line in found.lines if '"train"' in line]
    sent = {(e["round"], e["client"]): e["up"]["rows"] // (128 * 4) for e in entries}
    for (_, client), count in sent.items():
        if sampling == "server":
            assert count == found.server.examples[client]
    if sampling == "client":
        assert sum(count for (number, _), count in sent.items() if number == 3) == 16
    memory = found.server.memory
    assert memory["dictionary"].shape == (16, 128)
    assert ("rows" in memory) == (sampling == "replace")
    if sampling == "replace":
        assert {int(client) for client in memory["rows"]} == {client for _, client in sent}


# ---- protections ---------------------------------------------------------------------------------


def test_rows_with_noise_are_guarded_and_counted() -> None:
    found = trial({"noise": 0.5, "source": "received"})
    entries = [json.loads(line) for line in found.lines if '"train"' in line]
    for entry in entries:
        (release,) = entry["releases"]
        assert release["field"] == "rows"
        assert (release["sensitivity"], release["scale"]) == (2.0, 0.5)
    declared = found.method.exchanges()["train"].up["rows"]
    assert declared.guarded and declared.kind == "per_example"
    rows = found.server.memory["dictionary"]
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(len(rows)))


def test_means_of_groups_take_the_place_of_rows() -> None:
    found = trial({"group": 3, "size": 8})
    torch.testing.assert_close(found.server.memory["dictionary"].norm(dim=1), torch.ones(8))
    declared = found.method.exchanges()["train"].up["rows"]
    assert declared.kind == "statistic" and not declared.guarded
    assert "Rows that belong to single images leave" not in card(found.method).text()
    assert "Rows that belong to single images leave" in card(trial().method).text()
    with pytest.raises(ConfigError, match="choose one"):
        trial({"group": 3, "noise": 0.1})


def test_the_ledger_says_when_rows_of_single_images_leave() -> None:
    for group, said in ((1, "rows of single images left the client: rows"), (3, None)):
        lines = [json.loads(line) for line in trial({"group": group, "size": 8}).lines]
        notes = {line.get("note") for line in lines if line["step"] == "train"}
        assert notes == {said}
        assert not any("note" in line for line in lines if line["step"] == "align")


def said(**method: Any) -> str:
    return card(replace(first_trial("fedca", method=SMALL, public=PUBLIC).method, **method)).text()


def test_the_card_says_what_a_curious_server_and_curious_clients_get() -> None:
    bare = said()
    for part in (
        "in each round rows of numbers, 16 of all clients together, from each client by name",
        "what the client's model makes of one image, averaged over the rounds",
        "What other clients get: the next round's dictionary",
        "test whether an image that they know is among a client's",
        "Nothing hides these rows. Two settings can: method.noise adds",
        "dictionary: 16 rows of 128 numbers, 8,192 bytes, from round 2 on",
        "rows: at most 8,192 bytes of all clients together",
        "h: 64 bytes a public image and z: 512 bytes a public image",
    ):
        assert part in bare, part
    assert "averaged over" not in said(momentum=0.0)
    every = said(sampling="server")
    assert "as many as images, from each client" in every and "rows: 512 bytes a" in every
    noisy = said(noise=0.5, source="received")
    assert "Noise of 0.5 on each number" in noisy and "Nothing hides these rows" not in noisy
    means = said(group=4)
    assert "of at least 4 similar images, as a mean" in means and "there is no epsilon" in means
    assert "test whether an image" not in means
    for text in (noisy, means):
        assert "This is for rows alone: the model goes up beside them" in text


def test_without_a_dictionary_no_rows_leave_and_nothing_is_said_of_them() -> None:
    text = said(size=0)
    for untrue in (
        "Rows that belong to single images leave",
        "What the server gets",
        "with noise",
    ):
        assert untrue not in text
    found = trial({"size": 0, "noise": 0.5}, rounds=2)
    entries = [json.loads(line) for line in found.lines if '"train"' in line]
    assert all(entry["up"]["rows"] == 0 and "note" not in entry for entry in entries)
    assert not any(entry.get("releases") for entry in entries)


@given(st.integers(1, 40), st.integers(1, 7), st.integers(0, 3))
@settings(max_examples=60)
def test_every_group_has_at_least_as_many_rows_as_asked(count: int, least: int, seed: int) -> None:
    rows = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    means = grouped_means(rows, least)
    assert len(means) == count // least
    if len(means):  # a group of m rows weighs m: no group can be smaller than asked
        sizes = torch.linalg.lstsq(
            torch.cat([means.T, torch.ones(1, len(means))]),
            torch.cat([rows.sum(0), torch.tensor([float(count)])])[:, None],
        ).solution
        if len(means) <= 4:
            assert (sizes >= least - 1e-6).all()
    same = grouped_means(torch.ones(count, 2), least)
    assert torch.equal(same, torch.ones(count // least, 2))


def test_groups_are_of_similar_rows() -> None:
    rows = torch.tensor([[0.0, 1], [9, 1], [0.5, 0], [9.5, 0], [0.2, 2], [9.1, 2]])
    means = grouped_means(rows, 3)
    torch.testing.assert_close(means[means[:, 0].argsort()], torch.tensor([[0.7 / 3, 1], [9.2, 1]]))


@given(
    st.integers(0, 50),
    st.dictionaries(st.integers(0, 9), st.integers(1, 20), min_size=1),
    st.sampled_from(["client", "replace"]),
)
def test_quotas_add_up(size: int, examples: dict[int, int], sampling: Any) -> None:
    counts = quotas(size, sampling, examples, sorted(examples))
    assert sum(counts.values()) == min(size, sum(examples.values()))
    assert all(0 <= counts[client] <= count for client, count in examples.items())


def test_a_dictionary_has_its_size_whatever_was_sent() -> None:
    rows = {"10": torch.arange(20.0, 29)[:, None], "2": torch.arange(0.0, 9)[:, None]}
    whole = torch.cat([rows["2"], rows["10"]])  # whoever answered first
    torch.manual_seed(0)
    (some, owners), (others, _) = build_dictionary(rows, 6), build_dictionary(rows, 6)
    assert owners.tolist() == [10 if row >= 20 else 2 for row in some]
    assert len(some.unique()) == 6 and set(some.flatten().tolist()) <= set(whole.flatten().tolist())
    assert not torch.equal(some, others)  # drawn at random
    again, owners = build_dictionary(rows, 40)
    assert owners.tolist() == [10 if row >= 20 else 2 for row in again]
    assert again.shape == (40, 1) and torch.equal(again[:18], whole)
    assert len(again[18:].unique()) > 5
    assert [len(one) for one in build_dictionary({"0": torch.zeros(0, 3)}, 9)] == [0, 0]


# ---- messages and settings -----------------------------------------------------------------------


def test_bytes_are_those_of_the_paper() -> None:
    """ResNet-50 with 2048-2048-128: the model alone, rows beside it."""
    words = ["data=cifar10", "encoder=resnet50", "objective.hidden=2048", "clients=5"]
    method = Recipe.of("fedca", *words).known_method()
    made = card(method)
    assert made.bytes["train"]["down"] == 111_835_904 + 8  # the model, and how many rows to send
    assert made.bytes["train"]["up"] == 111_835_904 + 2 * 8  # loss and ratio
    counts = quotas(1024, "client", dict.fromkeys(range(5), 10_000), range(5))
    assert sorted(counts.values()) == [204, 205, 205, 205, 205]


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"momentum": 1.0}, "method.momentum is 1.0"),
        ({"size": -1}, "method.size is -1"),
        ({"align_batch": 0}, "method.align_batch is 0"),
        ({"noise": math.nan}, "method.noise is nan"),
    ],
)
def test_wrong_settings_are_refused(method: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trial(method)


def test_it_needs_infonce_and_public_images() -> None:
    with pytest.raises(ConfigError, match="set objective=infonce"):
        trial(objective="byol")
    with pytest.raises(ConfigError, match="needs public images"):
        Recipe.of("fedca", "public=none")  # before anything begins
    assert Recipe.of("fedca", "public=none", "method.strength=0").public is None


def test_a_round_without_targets_is_refused() -> None:
    found = trial()
    server = replace(found.server, memory={**found.server.memory, "told": []})
    plan = found.method.round(server, [0])
    ask = next(plan)
    assert ask.step == "align" and ask.least == 0  # nobody need be new, or answer
    with pytest.raises(NotEnoughReplies, match="alignment targets"):
        plan.send(SimpleNamespace(ids=[]))


def test_it_passes_the_contract_with_every_option() -> None:
    for more in (
        {"sampling": "replace", "exclude_own": True},
        {"noise": 0.1, "source": "received", "sampling": "server"},
        {"group": 2},
    ):
        checked = check_method("fedca", public=PUBLIC, method={**SMALL, **more})
        assert checked and TINY
