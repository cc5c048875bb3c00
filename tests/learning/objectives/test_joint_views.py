"""Whether the views of a batch share a BatchNorm pass: one setting for every objective."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from harmonium.learning.client import Batch, Examples
from harmonium.learning.context import Context
from harmonium.learning.objectives import objectives
from harmonium.learning.objectives.assignments import Clustered
from harmonium.learning.objectives.simclr import SimCLR
from harmonium.learning.parts import Part, Parts
from harmonium.methods import methods
from harmonium.recipe.schema import Recipe
from harmonium.testing import first_trial

# As the papers' released codes have it. Without one (autoencoder, infonce, supervised): joint.
JOINT = {
    "simclr": True,  # google-research/simclr joins the views before the network
    "swav": True,  # crops of one size are joined before the backbone
    "rotation": True,  # the four turns of a batch are one batch
    "byol": False,
    "simsiam": False,
    "moco": False,
    "barlow": False,
    "vicreg": False,
    "spectral": False,
    "assignments": False,
    "semi-spectral": False,
    "semi-simsiam": False,
}
ONE_VIEW = {"autoencoder"}
COUNT = 6


def rows_seen(parts: nn.Module) -> dict[str, list[int]]:
    """Rows of every pass through a BatchNorm, by the part it is in; filled as passes happen."""
    seen: dict[str, list[int]] = {}
    for path, module in parts.named_modules():
        if isinstance(module, _BatchNorm):
            into = seen.setdefault(path.partition(".")[0], [])
            module.register_forward_pre_hook(lambda _, x, into=into: into.append(len(x[0])))
    return seen


def passes(name: str, joint: bool | None) -> dict[str, list[int]]:
    """What BatchNorms look at in one step of an objective, within the method that can train it."""
    method = "orchestra" if name == "assignments" else "fedavg"
    views = "orchestra_three" if name == "assignments" else "simclr"
    local: dict[str, Any] = {"epochs": 1, "batch": 60} | (
        {} if joint is None else {"joint_views": joint}
    )
    changes: dict[str, Any] = {
        "objective": name, "views": views, "local": local, "rounds": 1, "clients": 2,
        "encoder": {"name": "cnn-small", "width": 4, "out": 16, "norm": "batch"},
    }  # fmt: skip
    if name.startswith(("semi", "supervised")):
        changes["split"] = {"name": "iid", "labels": 0.5}
    if method == "orchestra":
        changes["method"] = {
            "name": "orchestra",
            "clusters": 2,
            "local_clusters": 2,
            "global_steps": 1,
        }
    trial = first_trial(method, **changes)
    made = trial.method
    parts = made.blueprint.copy_from(trial.server.model).train()
    made.objective.prepare(parts, first=True)
    seen = rows_seen(parts)
    images = trial.dataset.train
    index = trial.split.indices[0][:COUNT]
    examples = Examples(images, index, uses_labels=True)
    batch = Batch(torch.arange(COUNT), examples, made.views, torch.Generator().manual_seed(0))
    context = Clustered(me=0, centroids=torch.eye(2, 16))
    made.objective.score(parts, made.objective.see(parts, batch), context)
    return seen


@pytest.mark.parametrize("name", sorted(objectives.table()))
def test_every_objective_passes_views_as_told(name: str) -> None:
    single = passes(name, False)
    assert single["encoder"] and {n for some in single.values() for n in some} == {COUNT}
    joint = passes(name, True)
    if name not in ONE_VIEW:
        assert max(joint["encoder"]) > COUNT
        for part in ("projector", "predictor"):
            assert all(n > COUNT for n in joint.get(part, []))
    unset = passes(name, None)
    assert unset == (joint if JOINT.get(name, True) else single)


def test_losses_by_hand_at_either_setting() -> None:
    """The same weights, BatchNorm over N rows a view against BatchNorm over all 2N."""
    torch.manual_seed(0)
    linear, views = nn.Linear(5, 4), [torch.randn(7, 5), torch.randn(7, 5) + 2]
    objective = SimCLR()
    for joint in (True, False):
        module = nn.Sequential(linear, nn.BatchNorm1d(4, affine=False))
        two = {"encoder": Part(module), "projector": Part(nn.Identity())}
        parts = Parts(two, {}, "average", joint)
        batch: Any = type("Batch", (), {"views": views})()
        loss = objective.score(parts, objective.see(parts, batch), Context(me=0))
        rows = [linear(view) for view in views]
        groups = [torch.cat(rows)] if joint else rows
        z = torch.cat([(g - g.mean(0)) / (g.var(0, correction=0) + 1e-5).sqrt() for g in groups])
        unit = functional.normalize(z)
        wanted = torch.zeros(())
        for i in range(14):
            others = [j for j in range(14) if j != i]
            similar = torch.stack([unit[i] @ unit[j] for j in others]) / 0.5
            wanted = wanted - similar.log_softmax(0)[others.index((i + 7) % 14)] / 14
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-4)
        tracked: Any = module[1].num_batches_tracked
        assert int(tracked) == (1 if joint else 2)


def test_methods_whose_code_differs_from_the_objectives_say_so() -> None:
    own = {name: cls.joint_views for name, cls in methods.table().items()}
    assert {name: joint for name, joint in own.items() if joint is not None} == {
        "fedx": True,  # both views and the random images are one batch
        "featarc": False,
        "featarc-clustered": False,
    }


def test_a_resolved_recipe_says_what_was_used_and_follows_its_objective() -> None:
    plain = Recipe.of("fedavg")
    assert plain.local.joint_views is None and plain.tree()["local"]["joint_views"] is True
    assert plain.method_for((8, 8, 1), 2).local.joint_views is True
    byol = plain.changed(objective="byol")
    assert byol.tree()["local"]["joint_views"] is False
    assert byol.method_for((8, 8, 1), 2).blueprint.joint_views is False
    assert Recipe.of("featarc").joint_views is False
    told = Recipe.of("fedavg", "local.joint_views=true").changed(objective="byol")
    assert told.joint_views is True
    for recipe in (plain, byol, told):
        again = Recipe.from_tree(recipe.tree())
        assert again.digest == recipe.digest and again.tree() == recipe.tree()
        assert "joint_views: null" not in recipe.yaml()


SMALL = {"name": "cnn-small", "width": 4, "out": 16, "norm": "batch"}
OWN: dict[str, dict[str, Any]] = {
    "fedx": {},
    "fedstyle": {"method": {"name": "fedstyle", "style_epochs": 0}},
    "apfl": {},
    "fedca": {"method": {"name": "fedca", "size": 8, "align_epochs": 1}},
    "fedu": {},
    "semifed": {"split": {"name": "iid", "labels": 0.5}},
    "cbafed": {"split": {"name": "iid", "labels": 0.5}},
}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("joint", [True, False])
def test_methods_with_steps_of_their_own_follow_it(
    name: str, joint: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every pass in training mode of a whole round, whatever the method makes of batches."""
    plain, rows = _BatchNorm.forward, list[int]()

    def look(norm: _BatchNorm, x: Tensor) -> Tensor:
        rows.extend([len(x)] if norm.training else [])
        return plain(norm, x)

    monkeypatch.setattr(_BatchNorm, "forward", look)
    local = {"epochs": 1, "batch": 5, "joint_views": joint}
    changes = {"encoder": SMALL, "clients": 2, "rounds": 1, "split": "iid", "local": local}
    public = {"public": {"name": "shapes", "count": 12, "size": 12, "test_count": 4}}
    more = public if name == "fedca" else {}
    first_trial(name, **{**changes, **OWN[name], **more})
    assert rows and (max(rows) >= 10 if joint else max(rows) <= 5)
