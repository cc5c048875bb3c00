import math
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from harmonium.core.errors import ConfigError, WireError
from harmonium.data.augment.views import preset
from harmonium.data.images import Images
from harmonium.evaluation.geometry import Health
from harmonium.federation.method import Method
from harmonium.learning.client import Batch, Client, Examples
from harmonium.learning.context import Context
from harmonium.learning.encoders.cnn import CnnSmall
from harmonium.learning.objectives.supervised import Supervised, known_cross_entropy
from harmonium.learning.training import Local
from harmonium.learning.world import World
from harmonium.privacy.mechanisms import Noise
from harmonium.runs.start import run
from harmonium.testing import TINY

pytestmark = pytest.mark.usefixtures("undrawn")


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def by_definition(logits: torch.Tensor, labels: list[int]) -> float:
    known = [(row.tolist(), label) for row, label in zip(logits, labels, strict=True) if label >= 0]
    costs = [math.log(sum(map(math.exp, row))) - row[label] for row, label in known]
    return sum(costs) / len(costs)


@pytest.mark.parametrize("labels", [[0], [2, 1], [0, -1, 2, 1, -1], [-1, 0, -1]])
def test_the_loss_is_the_mean_over_known_labels(labels: list[int]) -> None:
    logits = rows(len(labels), 3)
    loss = known_cross_entropy(logits, torch.tensor(labels))
    assert loss.item() == pytest.approx(by_definition(logits, labels))


@pytest.mark.parametrize("n", [1, 2, 5])
def test_without_known_labels_nothing_is_lost_and_nothing_moves(n: int) -> None:
    logits = rows(n, 3).requires_grad_()
    loss = known_cross_entropy(logits, torch.full((n,), -1))
    loss.backward()
    assert loss.item() == 0 and torch.equal(logits.grad, torch.zeros(n, 3, dtype=torch.float64))


def test_gradients_are_right_and_unknown_images_have_none() -> None:
    labels, logits = torch.tensor([1, -1, 0]), rows(3, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: known_cross_entropy(x, labels), (logits,))
    known_cross_entropy(logits, labels).backward()
    assert logits.grad[1].abs().sum() == 0 and logits.grad[0].abs().sum() > 0


def test_collapsed_features_cost_the_entropy_of_the_labels_at_best() -> None:
    labels = torch.tensor([0, 0, 0, 1])
    best = torch.tensor([[0.75, 0.25]]).log().repeat(4, 1)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert known_cross_entropy(best, labels).item() == pytest.approx(entropy)
    assert known_cross_entropy(20 * torch.eye(2)[labels], labels).item() < 1e-6


def classroom(uses_labels: bool = True, **local: object) -> tuple[Method, Client]:
    digits = load_digits(n_class=3)
    pixels = (digits.images[:60, :, :, None] * 15.9).astype(np.uint8)
    labels = np.where(np.arange(60) % 4 == 0, -1, digits.target[:60])
    method = Method(
        world=World(channels=1, side=8, classes=3),
        encoder=CnnSmall(width=4, out=16, norm="none"),
        objective=Supervised(),
        views=preset("digits"),
        local=Local(**{"epochs": 1, "batch": 20, **local}),  # type: ignore[arg-type]
    )
    rng = torch.Generator().manual_seed(0)
    examples = Examples(Images(pixels, labels), np.arange(60), uses_labels=uses_labels)
    return method, Client(0, 1, 1, examples, method.views, rng, Noise("simulated", rng))


def test_every_view_is_classified() -> None:
    method, client = classroom()
    parts = method.pull(client, method.blueprint.shared())
    batch = Batch(torch.arange(10), client.examples, client.views, client.rng)
    loss = method.objective.score(parts, method.objective.see(parts, batch), Context(me=0))
    each = [parts["classifier"](parts["encoder"](view)).detach() for view in batch.views]
    wanted = sum(by_definition(logits, batch.labels.tolist()) for logits in each) / 2
    assert len(each) == 2 and loss.item() == pytest.approx(wanted, rel=1e-5)


def test_it_learns_labels_from_those_that_have_one() -> None:
    method, client = classroom(epochs=20, optimiser="adam", lr=0.01)
    parts = method.pull(client, method.blueprint.shared())
    before = {key: value.clone() for key, value in parts.state_dict().items()}
    assert math.isfinite(method.fit(parts, client).loss)
    assert all(not torch.equal(value, before[key]) for key, value in parts.state_dict().items())
    assert parts.rules == {"encoder": "mean", "classifier": "mean"}
    plain = client.views.plain(client.examples.pixels())
    guessed = parts["classifier"](parts["encoder"](plain)).argmax(1)
    assert (guessed.numpy() == load_digits(n_class=3).target[:60]).mean() > 0.9


def test_labels_need_permission_which_the_objective_asks_for() -> None:
    assert Supervised.uses_labels and not Method.uses_labels
    method, client = classroom(uses_labels=False)
    parts = method.pull(client, method.blueprint.shared())
    with pytest.raises(WireError, match="uses_labels"):
        method.fit(parts, client)


def test_the_classifier_has_one_row_a_class() -> None:
    part = Supervised().build({}, 512, World(classes=10))["classifier"]
    assert sum(p.numel() for p in part.module.parameters()) == 5_130


def test_unlabelled_images_are_refused() -> None:
    with pytest.raises(ConfigError, match="objective=supervised needs labelled images"):
        Supervised().build({}, 512, World(classes=0))


def test_only_labelled_images_make_steps() -> None:
    labels = np.array([-1, 2, -1, 1, 0, -1])
    images = Images(np.zeros((6, 4, 4, 1), np.uint8), labels)
    known = Supervised().among(Examples(images, np.arange(6), uses_labels=True))
    assert known.tolist() == [1, 3, 4]
    rng = torch.Generator().manual_seed(0)
    client = Client(
        0, 1, 1, Examples(images, np.arange(6), uses_labels=True), preset("simclr"), rng, None
    )  # type: ignore[arg-type]
    batches = [batch.labels for batch in client.batches(2, 2, among=known)]
    assert [len(batch) for batch in batches] == [2, 2]  # one of three is left over each time
    assert all((batch >= 0).all() for batch in batches)


def test_the_reported_loss_is_that_of_labelled_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        **TINY,
        "objective": "supervised",
        "split": {"name": "dirichlet", "alpha": 1.0, "labels": 0.1},
        "engine": {"workers": 0},
        "evaluate": {"k": 5, "health": 32, "labels_per_class": []},
    }
    # Labels may leave no more directions than classes, so nothing is called collapsed.
    monkeypatch.setattr(Health, "warnings", lambda *given: ("collapsed",))
    found = run("fedavg", out=tmp_path / "run", **settings)
    assert found.rounds[1]["loss"] == pytest.approx(math.log(8), rel=0.25)  # not mixed with zeros
    assert found.figures["health"]["warnings"] == [] and "collapsed" not in found.reasons
