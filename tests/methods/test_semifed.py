"""SemiFed: its loss written out, its invariants, and what terms see of it."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from harmonium.core.errors import ConfigError
from harmonium.data.augment.views import View, Views, preset
from harmonium.data.images import Images
from harmonium.federation.method import Method
from harmonium.learning.client import Batch, Client, Examples
from harmonium.learning.encoders.cnn import CnnSmall
from harmonium.learning.objectives.simclr import SimCLR
from harmonium.learning.objectives.supervised import Supervised
from harmonium.learning.terms import Term
from harmonium.learning.training import Local
from harmonium.learning.world import World
from harmonium.methods.fedavg import FedAvg
from harmonium.methods.pseudo_labels import class_probabilities
from harmonium.methods.semifed import Predicted, SemiFed, pseudo_labels
from harmonium.privacy.mechanisms import Noise
from harmonium.recipe.schema import Recipe
from harmonium.testing import check_method

LOCAL = Local(epochs=2, batch=8, lr=0.05, momentum=0.5, schedule="constant", clip=None)
COMMON: dict[str, Any] = {
    "world": World(clients=2, channels=1, side=8, classes=3),
    "encoder": CnnSmall(width=4, out=8, norm="batch"),
    "objective": Supervised(),
    "local": LOCAL,
}
MIXED = [0, -1, 2, -1, -1, 1, -1, -1, 0, -1, -1, -1]


def method(**changes: Any) -> SemiFed:
    return SemiFed(**{**COMMON, "views": preset("semifed"), **changes})


def client_of(made: Method, labels: list[int], seed: int = 0) -> Client:
    pixels = np.random.default_rng(1).integers(0, 256, (len(labels), 8, 8, 1), dtype=np.uint8)
    images = Images(pixels, np.array(labels))
    rng = torch.Generator().manual_seed(seed)
    examples = Examples(images, np.arange(len(labels)), uses_labels=made.reads_labels)
    return Client(0, 1, 1, examples, made.views, rng, Noise("simulated", rng))


def trained(made: Method, labels: list[int]) -> dict[str, Any]:
    client = client_of(made, labels)
    return made.train(client, SimpleNamespace(model=made.blueprint.shared()))  # type: ignore[return-value]


def same(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return all(torch.equal(value, two["model"][key]) for key, value in one["model"].items())


@pytest.mark.parametrize("threshold", [0.2, 0.8, 1.1])
@pytest.mark.parametrize("consistency", [0.0, 0.7])
def test_the_loss_is_the_equation(threshold: float, consistency: float) -> None:
    made = method(threshold=threshold, consistency=consistency)
    client = client_of(made, MIXED)
    parts = made.blueprint.copy_from()
    unlabelled = (torch.tensor(MIXED) == -1)[:, None]
    drawn = torch.randn(12, 3, generator=torch.Generator().manual_seed(2))
    q = (2 * drawn).softmax(1) * unlabelled
    parts.eval()  # so that every row can be computed alone
    index = torch.tensor([11, 0, 3, 5, 1, 7, 2])
    batch = Batch(index, client.examples, client.views, torch.Generator().manual_seed(4))
    context = Predicted(me=0, q=q, guess=pseudo_labels(q, threshold))
    got = made.loss(parts, context)(batch)

    rng = torch.Generator().manual_seed(4)
    labels = torch.tensor(MIXED)[index]
    two = Views((View(), View()))(batch.pixels, rng)
    strong = View(randaugment=2)(batch.pixels[labels == -1], rng)
    predict = lambda x: parts["classifier"](parts["encoder"](x)).log_softmax(1)  # noqa: E731
    known, unknown = (labels != -1).nonzero().flatten(), index[labels == -1]
    wanted = sum(-predict(view)[known, labels[known]].mean() for view in two)
    rows, guess, sure = predict(strong), q[unknown].argmax(1), q[unknown].amax(1) >= threshold
    if sure.any():
        wanted = wanted - rows[sure, guess[sure]].mean()
    kl = (q[unknown] * (q[unknown].log() - rows)).sum(1).mean()
    torch.testing.assert_close(got, wanted + consistency * kl)
    assert sure.sum() == {0.2: 4, 0.8: 2, 1.1: 0}[threshold]


def test_predictions_are_of_the_received_model_in_evaluation_mode() -> None:
    made = method()
    client = client_of(made, MIXED)
    parts = made.blueprint.copy_from()
    parts.train()
    before = {key: value.clone() for key, value in parts.state_dict().items()}
    q = class_probabilities(parts, client, 3)
    assert all(torch.equal(before[key], value) for key, value in parts.state_dict().items())
    one = client.examples.pixels(torch.tensor([4]))
    alone = parts["classifier"](parts["encoder"](made.views.plain(one))).softmax(1)
    torch.testing.assert_close(q[4:5], alone)  # no other image moves it
    assert not q.requires_grad
    assert q[torch.tensor(MIXED) != -1].count_nonzero() == 0


def test_with_all_labels_it_is_supervised_fedavg_at_twice_the_rate() -> None:
    labels = [0, 1, 2] * 4
    fast = FedAvg(**COMMON | {"local": replace(LOCAL, lr=0.1)}, views=preset("fedsimclr"))
    assert same(trained(method(), labels), trained(fast, labels))
    assert not same(trained(method(), MIXED), trained(fast, MIXED))


def test_without_confidence_and_consistency_only_labels_teach() -> None:
    quiet = method(threshold=1.1, consistency=0.0)
    up = trained(quiet, [-1] * 12)
    assert up["loss"] == 0
    parameters = {key for key, _ in quiet.blueprint.named_parameters()}
    start = quiet.blueprint.shared()
    assert all(torch.equal(up["model"][key], start[key]) for key in parameters)
    assert trained(quiet, MIXED)["loss"] > 0
    assert trained(method(), [-1] * 12)["loss"] > 0  # a client without labels learns


SEEN: list[dict[str, Any]] = []


@dataclass(frozen=True)
class Watcher(Term):
    """Notes what a term is given."""

    def score(self, parts, seen, context):  # type: ignore[no-untyped-def]
        SEEN.append({**vars(context), "h": seen.h, "index": seen.batch.index})
        return seen.h[0].sum() * 0


def test_pseudo_labels_stay_for_the_round_and_terms_see_two_views_of_all() -> None:
    SEEN.clear()
    made = method(terms=(Watcher(),), threshold=0.42, local=replace(LOCAL, epochs=4, lr=0.5))
    client = client_of(made, MIXED)
    up = made.train(client, SimpleNamespace(model=made.blueprint.shared()))
    start = class_probabilities(made.blueprint.copy_from(), client, 3)
    end = class_probabilities(made.blueprint.copy_from(up["model"]), client, 3)
    assert len(SEEN) == 8
    assert all(torch.equal(seen["q"], start) for seen in SEEN)
    assert all(torch.equal(seen["guess"], pseudo_labels(start, 0.42)) for seen in SEEN)
    assert not torch.equal(pseudo_labels(start, 0.42), pseudo_labels(end, 0.42))  # others by now
    assert all([h.shape for h in seen["h"]] == [(len(seen["index"]), 8)] * 2 for seen in SEEN)
    assert all(seen["me"] == 0 for seen in SEEN)
    looked = torch.cat([seen["index"] for seen in SEEN[:2]])
    assert sorted(looked.tolist()) == list(range(12))  # all images, not the labelled alone


def test_the_gradient_does_not_reach_what_is_predicted_once() -> None:
    made = method(threshold=1.1)
    client = client_of(made, [-1] * 8)
    parts = made.blueprint.copy_from()
    q = class_probabilities(parts, client, 3)
    batch = Batch(torch.arange(8), client.examples, client.views, torch.Generator())
    context = Predicted(me=0, q=q, guess=torch.full((8,), -1))
    made.loss(parts, context)(batch).backward()  # type: ignore[no-untyped-call]
    torch.manual_seed(0)
    seen = made.see(parts, Batch(torch.arange(8), client.examples, client.views, torch.Generator()))
    p = parts["classifier"](seen.strong).softmax(1)
    # Of KL(q || softmax(logits)) by the bias of the logits: mean of p - q.
    torch.testing.assert_close(parts["classifier"].bias.grad, (p - q).mean(0), atol=1e-6, rtol=0)


def test_it_passes_the_contract_with_few_labels_and_user_verification() -> None:
    few = {"name": "dirichlet", "alpha": 1.0, "labels": 0.3}
    check_method("semifed", split=few, terms="uv")


def test_other_objectives_and_views_are_refused() -> None:
    with pytest.raises(ConfigError, match="objective is simclr; set objective=supervised"):
        method(objective=SimCLR())
    with pytest.raises(ConfigError, match="objective is simclr; set objective=supervised"):
        Recipe.of("semifed", "objective=simclr")  # whose views would not suit it either
    with pytest.raises(ConfigError, match="views=semifed"):
        method(views=preset("fedsimclr"))
    with pytest.raises(ConfigError, match=r"method.threshold is -1"):
        method(threshold=-1.0)
