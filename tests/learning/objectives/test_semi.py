"""Contrast inside classes: a sum of parts, and the plain objective where labels are missing."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional

from harmonium.core.errors import ConfigError
from harmonium.data.augment.views import preset
from harmonium.data.images import Images
from harmonium.data.partition import make_split
from harmonium.federation.method import Method
from harmonium.learning.client import Batch, Client, Examples
from harmonium.learning.context import Context
from harmonium.learning.encoders.cnn import CnnSmall
from harmonium.learning.objectives import Objective, Seen
from harmonium.learning.objectives.infonce import InfoNCE, info_nce
from harmonium.learning.objectives.semi import SemiInfoNCE, SemiSimSiam, SemiSpectral, all_pairs
from harmonium.learning.objectives.simsiam import SimSiam, negative_cosine
from harmonium.learning.objectives.spectral import Spectral, spectral_contrast
from harmonium.learning.terms.verification import Verification
from harmonium.learning.training import Local
from harmonium.learning.world import World
from harmonium.privacy.mechanisms import Noise
from harmonium.recipe.schema import Recipe
from harmonium.runs.start import evaluation_data, run
from harmonium.testing import TINY

pytestmark = pytest.mark.usefixtures("undrawn")

CALM: dict[str, Any] = {"norm": "none"}  # no BatchNorm, so that an image's loss is its own
PAIRS: list[tuple[Objective, Objective]] = [
    (SemiInfoNCE(**CALM), InfoNCE(**CALM)),
    (SemiSpectral(**CALM), Spectral(**CALM)),
    (SemiSimSiam(**CALM, out_norm=False, pairs="same"), SimSiam(**CALM, out_norm=False)),
]
pairs = pytest.mark.parametrize(("semi", "plain"), PAIRS)


def classroom(objective: Objective, labels: list[int], **local: Any) -> tuple[Method, Client, Any]:
    """A client with these labels, and its model."""
    count = len(labels)
    pixels = (load_digits(n_class=4).images[:count, :, :, None] * 15.9).astype(np.uint8)
    method = Method(
        world=World(clients=2, channels=1, side=8, classes=4),
        encoder=CnnSmall(width=4, out=16, norm="none"),
        objective=objective,
        views=preset("digits"),
        local=Local(**{"epochs": 1, "batch": 100, **local}),
    )
    rng = torch.Generator().manual_seed(0)
    examples = Examples(Images(pixels, np.array(labels)), np.arange(count), uses_labels=True)
    client = Client(0, 1, 1, examples, method.views, rng, Noise("simulated", rng))
    return method, client, method.pull(client, method.blueprint.shared())


def look(objective: Objective, labels: list[int]) -> tuple[Any, Seen, Tensor]:
    method, client, parts = classroom(objective, labels)
    batch = Batch(torch.arange(len(labels)), client.examples, client.views, client.rng)
    seen = objective.see(parts, batch)
    return parts, seen, objective.score(parts, seen, Context(me=0))


@pairs
def test_without_labels_it_is_the_plain_objective(semi: Objective, plain: Objective) -> None:
    labels = [-1] * 7
    _, _, ours = look(semi, labels)
    _, _, theirs = look(plain, labels)
    assert ours.item() == theirs.item()


@pairs
def test_a_batch_of_one_class_is_the_plain_objective_and_the_label_loss(
    semi: Objective, plain: Objective
) -> None:
    parts, seen, ours = look(semi, [2] * 6)
    _, _, theirs = look(plain, [2] * 6)
    wanted = torch.full((6,), 2)
    heads = [functional.cross_entropy(parts["classifier"](h), wanted).item() for h in seen.h]
    assert ours.item() == pytest.approx(theirs.item() + sum(heads), rel=1e-5)


LABELS = [0, -1, 1, 1, -1, 0, 0, 3, -1]  # 3 stands alone


def by_parts(parts: Any, seen: Seen, one: Any, least: int) -> float:
    """Equation 12 and the fallback, group by group."""
    labels = seen.batch.labels
    total = 0.0
    for h in seen.h:
        logits = parts["classifier"](h).detach().double()
        known = [k for k in range(len(labels)) if labels[k] >= 0]
        costs = [float(logits[k].logsumexp(0) - logits[k, labels[k]]) for k in known]
        total += sum(costs) / len(costs)
    for label in (-1, 0, 1, 3):
        group = [k for k in range(len(labels)) if labels[k] == label]
        if len(group) >= least:
            total += one(group, label).item()
    return total


def test_every_class_is_contrasted_for_itself() -> None:
    parts, seen, loss = look(SemiInfoNCE(**CALM), LABELS)
    first, second = seen.pair()
    wanted = by_parts(parts, seen, lambda g, _: info_nce(first[g], second[g], 0.5), 1)
    assert loss.item() == pytest.approx(wanted, rel=1e-5)  # a class of one costs log 1
    parts, seen, loss = look(SemiSpectral(**CALM), LABELS)
    first, second = seen.pair()
    wanted = by_parts(parts, seen, lambda g, _: spectral_contrast(first[g], second[g]), 2)
    assert loss.item() == pytest.approx(wanted, rel=1e-5)


def test_simsiam_compares_all_pairs_of_a_class_and_views_of_the_others() -> None:
    objective = SemiSimSiam(**CALM, out_norm=False)
    parts, seen, _ = look(objective, LABELS)
    # Numbers that lie far apart, which those of an untrained network do not.
    drawn = torch.randn(4, len(LABELS), 16, generator=torch.Generator().manual_seed(0))
    seen = replace(seen, z=list(drawn[:2]), t=list(drawn[2:]))
    loss = objective.score(parts, seen, Context(me=0))
    (first, second), guesses = seen.pair(), seen.t

    def one(group: list[int], label: int) -> Tensor:
        p1, p2, z1, z2 = guesses[0][group], guesses[1][group], first[group], second[group]
        if label < 0:
            return negative_cosine(p1, p2, z1, z2)
        cosines = [
            functional.cosine_similarity(p[i], z[j], dim=0).item()
            for p, z in ((p1, z2), (p2, z1))
            for i in range(len(group))
            for j in range(len(group))
        ]
        return torch.tensor(-sum(cosines) / len(cosines))

    assert loss.item() == pytest.approx(by_parts(parts, seen, one, 1), rel=1e-5)


def test_gradients_of_all_pairs_are_right_and_targets_have_none() -> None:
    rng = torch.Generator().manual_seed(0)
    four = [torch.randn(3, 4, dtype=torch.float64, generator=rng) for _ in range(4)]
    guesses = [tensor.requires_grad_() for tensor in four[:2]]
    assert torch.autograd.gradcheck(lambda a, b: all_pairs(a, b, *four[2:]), guesses)
    targets = [tensor.requires_grad_() for tensor in four[2:]]
    all_pairs(*guesses, *targets).backward()
    assert targets[0].grad is None and guesses[0].grad is not None


@pairs
@pytest.mark.parametrize("labels", [[-1, 2], [2, -1], [1, 1], [0, 1]])
def test_batches_of_two_have_finite_gradients(
    semi: Objective, plain: Objective, labels: list[int]
) -> None:
    parts, _, loss = look(semi, labels)
    loss.backward()
    grads = [p.grad for p in parts.parameters() if p.grad is not None]
    assert math.isfinite(loss.item()) and all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("objective", [SemiInfoNCE(), SemiSpectral(), SemiSimSiam()])
def test_labels_are_learned_and_unlabelled_images_take_part(objective: Objective) -> None:
    target = load_digits(n_class=4).target[:60]
    labels = [int(t) if k % 2 else -1 for k, t in enumerate(target)]
    steps = {"epochs": 60, "batch": 20, "optimiser": "adam", "lr": 0.01}
    method, client, parts = classroom(objective, labels, **steps)
    before = parts["projector"][0].weight.detach().clone()
    method.fit(parts, client)
    parts.eval()
    plain = client.views.plain(client.examples.pixels())
    guessed = parts["classifier"](parts["encoder"](plain)).argmax(1).numpy()
    known = np.array(labels) >= 0
    assert (guessed[known] == target[known]).mean() > 0.9
    assert not torch.equal(parts["projector"][0].weight, before)


def test_verification_can_leave_labelled_images_out() -> None:
    for on, count in (("all", 9), ("unlabelled", 3)):
        term = Verification(pictures=on)  # type: ignore[arg-type]
        objective = SemiInfoNCE(**CALM)
        method, client, _ = classroom(objective, LABELS)
        method = replace(method, terms=(term,))
        parts = method.pull(client, method.blueprint.shared())
        batch = Batch(torch.arange(9), client.examples, client.views, client.rng)
        seen = objective.see(parts, batch)
        chosen = [k for k in range(9) if on == "all" or LABELS[k] < 0]
        some = Seen(batch, [h[chosen] for h in seen.h], [])
        alone = Verification().score(parts, some, Context(me=0))
        assert len(chosen) == count
        assert term.score(parts, seen, Context(me=0)).item() == pytest.approx(
            alone.item(), rel=1e-6
        )
    full = Batch(torch.tensor([0, 2]), client.examples, client.views, client.rng)
    nothing = term.score(parts, objective.see(parts, full), Context(me=0))  # all of them labelled
    assert nothing.item() == 0


def test_the_label_head_is_the_only_part_more() -> None:
    made = SemiInfoNCE(hidden=2048).build({}, 512, World(classes=10))
    assert set(made) == {"projector", "classifier"}
    assert sum(p.numel() for p in made["classifier"].module.parameters()) == 512 * 10 + 10
    with pytest.raises(ConfigError, match="semi-infonce needs labelled images"):
        SemiInfoNCE().build({}, 512, World(classes=0))


def test_guesses_are_made_for_the_whole_batch() -> None:
    parts, seen, _ = look(SemiSimSiam(**CALM, out_norm=False), LABELS)
    for guess, z in zip(seen.t, seen.z, strict=True):
        torch.testing.assert_close(guess, parts["predictor"](z))


def test_a_run_with_few_labels_is_judged_by_those_labels_too(tmp_path: Path) -> None:
    settings = {
        **TINY,
        "objective": "semi-infonce",
        "split": {"name": "dirichlet", "alpha": 1.0, "labels": 0.2, "labelled": 0.5},
        "engine": {"workers": 0},
        "evaluate": {"k": 5, "health": 32, "labels_per_class": []},
    }
    found = run("fedavg", out=tmp_path / "run", **settings)
    assert 0 <= found.figures["linear_labelled"] <= 1
    assert "linear_labelled" in found.untrained
    assert found.rounds[2]["answered"] == 4  # those without any label train as well


def test_the_probe_learns_from_the_labels_that_clients_may_see() -> None:
    settings = {**TINY, "split": {"name": "iid", "labels": 0.2, "labelled": 0.5}}
    recipe = Recipe.from_tree(settings)
    dataset = recipe.data.load()
    split = make_split(recipe.split, dataset, None, recipe.clients, recipe.seed)
    judged = evaluation_data(dataset, split)
    assert split.labelled is not None and judged.labelled is not None
    rows = [index[own] for index, own in zip(split.indices, split.labelled, strict=True)]
    wanted = np.sort(np.concatenate(rows))
    assert np.array_equal(judged.labelled.labels, dataset.train.labels[wanted])
    assert np.array_equal(judged.labelled.pixels, dataset.train.batch(wanted))
    whole = make_split(recipe.split.__class__(), dataset, None, recipe.clients, recipe.seed)
    assert evaluation_data(dataset, whole).labelled is None
