"""What tells clients apart: the equations, what content must not see, and the advice."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import harmonium
from harmonium.cli.main import main
from harmonium.cli.terminal import show_result
from harmonium.core.errors import DataError
from harmonium.data.partition import make_split
from harmonium.data.shift import turned, with_split_angles
from harmonium.engines.runtime import ClientRuntime
from harmonium.learning.symmetric import unpack
from harmonium.methods.diagnosis import Diagnosis
from harmonium.methods.diagnosis.features import CONTENT, described
from harmonium.methods.diagnosis.scatter import Spread, Sums, group_sums, spread
from harmonium.recipe.schema import Recipe
from harmonium.runs.open_run import make_runtime
from harmonium.runs.start import run
from harmonium.studies.diagnosis import CHANCE, Finding, diagnose, diagnose_run, finding, verdict_of
from harmonium.testing import CHECKS, check_method

pytestmark = pytest.mark.usefixtures("undrawn")

SHAPES = ["data=shapes", "data.count=1200", "data.test_count=10"]
HIDDEN = [*SHAPES, "data.unlabelled=true"]


def added_up(groups: list[Tensor]) -> Sums:
    total, within, between = (sum(parts) for parts in zip(*map(group_sums, groups), strict=True))
    assert isinstance(total, Tensor) and isinstance(within, Tensor) and isinstance(between, Tensor)
    within, between = (unpack(packed, len(total)) for packed in (within, between))
    return Sums(len(groups), sum(map(len, groups)), total, within, between)


def drawn(means: Tensor, sizes: list[int], seed: int) -> list[Tensor]:
    """Groups of Gaussian vectors with one covariance, far from a multiple of the identity."""
    rng = torch.Generator().manual_seed(seed)
    dim = means.shape[1]
    mixing = torch.eye(dim) + 0.8 * torch.ones(dim, dim).triu(1)
    return [
        (mean + torch.randn(size, dim, generator=rng)) @ mixing
        for mean, size in zip(means, sizes, strict=True)
    ]


# ---- the equations -------------------------------------------------------------------------------


def test_the_distance_is_unbiased_also_with_few_images_and_unequal_groups() -> None:
    means = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)) * 0.5
    sizes = [10, 20, 30, 40]
    weights = torch.tensor(sizes) / 100
    truth = float((weights * (means - weights @ means).square().sum(1)).sum())
    found = [spread(added_up(drawn(means, sizes, seed))) for seed in range(400)]
    distances = np.array([one.distance for one in found])
    assert abs(distances.mean() - truth) < 4 * distances.std() / 20
    errors = np.mean([one.error for one in found])
    assert errors == pytest.approx(distances.std(), rel=0.15)


@pytest.mark.parametrize("sizes", [[30, 30], [5] * 12, [10, 100, 20]])
def test_equal_means_score_like_a_normal_deviate(sizes: list[int]) -> None:
    means = torch.zeros(len(sizes), 5)
    found = [spread(added_up(drawn(means, sizes, seed))) for seed in range(400)]
    scores = np.array([one.score for one in found])
    assert abs(scores.mean()) < 0.2 and 0.85 < scores.std() < 1.2
    assert scores.max() < 4
    # Choosing directions by their variance leaves out 1 of 5 for the second: a little too low.
    assert -0.05 < np.mean([one.distance for one in found]) < 0.02


def test_the_distance_does_not_depend_on_units_order_or_place() -> None:
    groups = drawn(torch.eye(4), [40, 50, 60, 70], 0)
    plain = spread(added_up(groups))
    scaled = [group @ torch.diag(torch.tensor([1.0, 30.0, 0.02, -5.0])) + 7 for group in groups]
    for same in (groups[::-1], scaled):
        assert spread(added_up(same)).distance == pytest.approx(plain.distance, rel=1e-5)


def test_directions_that_say_nothing_are_left_out() -> None:
    groups = drawn(torch.eye(4), [40, 50, 60, 70], 0)
    padded = [torch.cat([g, g[:, :1] * 2, torch.ones(len(g), 1)], 1) for g in groups]
    found, plain = spread(added_up(padded)), spread(added_up(groups))
    assert found.directions == plain.directions == 4
    assert found.distance == pytest.approx(plain.distance, rel=1e-5)
    flat = spread(added_up([torch.ones(30, 3), torch.ones(30, 3)]))
    assert (flat.directions, flat.distance, flat.score) == (0, 0.0, 0.0)


def test_too_few_groups_or_images_are_refused() -> None:
    with pytest.raises(DataError, match="at least 2 clients"):
        spread(added_up([torch.randn(50, 2)]))
    with pytest.raises(DataError, match="at least 22"):
        spread(added_up([torch.randn(5, 2), torch.randn(6, 2)]))


@pytest.mark.parametrize(
    ("whole", "content", "verdict"),
    [
        ((0.01, 1), (0.00, 0), "alike"),
        ((1.00, 80), (0.30, 40), "content"),
        ((1.00, 80), (0.01, 1), "style"),
        ((1.00, 80), (0.06, 6), "style"),  # content differs as well, but style drowns it
        ((0.10, 9), (0.03, 3), "unclear"),
        ((0.02, 3), (0.04, 6), "content"),  # seen in fewer directions alone
    ],
)
def test_the_share_of_content_decides(
    whole: tuple[float, float], content: tuple[float, float], verdict: str
) -> None:
    first, second = (Spread(one[0], 0.01, one[1], 60) for one in (whole, content))
    assert verdict_of(first, second) == verdict
    narrow = replace(second, width=0.7)  # no client's own images vary there: perhaps a style
    assert verdict_of(first, narrow) == ("unclear" if verdict == "content" else verdict)


def test_alike_is_said_only_where_a_difference_would_have_been_seen() -> None:
    for error, verdict in ((0.01, "alike"), (0.12, "alike"), (0.13, "unclear")):
        same = Spread(0.0, error, 0.5, 60)
        assert verdict_of(same, same) == verdict
    found = diagnose("data=digits", "split=dirichlet", "data.limit=60", clients=10)
    assert found.verdict == "unclear" and "images are few" in " ".join(found.sentences())


@pytest.mark.parametrize("wide", [True, False])
def test_the_width_tells_along_which_directions_groups_lie_apart(wide: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    common = torch.randn(600, 1, generator=rng)
    rows = torch.randn(600, 5, generator=rng) + 3 * common * torch.tensor([1.0, 1, 1, 0, 0])
    step = torch.tensor([1.0, 1, 1, 0, 0]) if wide else torch.tensor([1.0, -1, 0, 0, 0])
    found = spread(added_up([rows[:300], rows[300:] + 2 * step]))
    assert found.score > CHANCE
    assert found.width > 2 if wide else found.width < 0.5


# ---- what describes an image --------------------------------------------------------------------


@pytest.fixture(scope="module")
def pictures() -> Tensor:
    train = (
        Recipe.of("fedavg", "data=shapes", "data.count=200", "data.test_count=1").data.load().train
    )
    return torch.from_numpy(np.array(train.batch(np.arange(100))))


def moved(before: Tensor, after: Tensor) -> tuple[float, float]:
    """How far content and the coarse copy move, beside how far images lie from each other."""
    first, second = described(before), described(after)
    steps, spreads = (second - first).abs(), first.std(0) + 1e-9
    ratios = steps.mean(0) / spreads
    return float(ratios[:CONTENT].max()), float(ratios[CONTENT:].max())


def mirrored(pixels: Tensor) -> Tensor:
    return pixels.flip(2)


def quarter(pixels: Tensor) -> Tensor:
    return pixels.rot90(1, (1, 2))


def dimmed(pixels: Tensor) -> Tensor:
    return (pixels.float() * 0.5 + 40).round().to(torch.uint8)


def greyed(pixels: Tensor) -> Tensor:
    light = pixels.float() @ torch.tensor([0.299, 0.587, 0.114])
    return light.round().to(torch.uint8)[..., None].expand(-1, -1, -1, 3)


def spun(pixels: Tensor) -> Tensor:
    return torch.from_numpy(turned(pixels.numpy(), np.full(len(pixels), 33, np.float32)))


@pytest.mark.parametrize(
    ("change", "most"),
    [(mirrored, 1e-3), (quarter, 1e-3), (dimmed, 0.05), (greyed, 0.05), (spun, 0.25)],
)
def test_content_does_not_see_style(
    pictures: Tensor, change: Callable[[Tensor], Tensor], most: float
) -> None:
    content, coarse = moved(pictures, change(pictures))
    assert content < most
    assert coarse > 0.4


def test_large_images_are_averaged_down(pictures: Tensor) -> None:
    double = pictures.repeat_interleave(2, 1).repeat_interleave(2, 2)
    torch.testing.assert_close(described(double), described(pictures))


@pytest.mark.parametrize("shape", [(8, 8, 1), (28, 28, 1), (40, 64, 3), (9, 33, 3)])
def test_images_of_any_shape_are_described(shape: tuple[int, int, int]) -> None:
    rng = np.random.default_rng(0)
    pixels = torch.from_numpy(rng.integers(0, 256, (4, *shape), np.uint8))
    rows = described(torch.cat([pixels, torch.full_like(pixels[:1], 7)]))
    assert rows.shape == (5, CONTENT + 9 * (shape[2] + 2))
    assert torch.isfinite(rows).all()


# ---- the ask -------------------------------------------------------------------------------------


def test_the_sums_are_those_of_the_images_as_they_are_held() -> None:
    words = ["data=digits", "split=rotation", "clients=4", "seed=5"]
    recipe = Recipe.of("fedavg", *words)
    dataset = recipe.data.load()
    split = make_split(recipe.split, dataset, None, 4, 5)
    train = with_split_angles(dataset, split).train
    rows = [described(torch.from_numpy(np.array(train.batch(own)))) for own in split.indices]
    direct = finding(added_up(rows[::-1]), sent={}, silent={})
    found = diagnose(*words)
    for mine, theirs in ((direct.whole, found.whole), (direct.content, found.content)):
        assert mine.distance == pytest.approx(theirs.distance, rel=1e-6)
    assert found.images == sum(map(len, rows)) and found.clients == 4


def test_secure_aggregation_finds_the_same_and_hides_single_clients() -> None:
    words = ["data=digits", "split=dirichlet", "clients=4"]
    plain, masked = diagnose(*words), diagnose(*words, "privacy.secure_aggregation=true")
    assert masked.verdict == plain.verdict == "content"
    assert plain.use_uv and plain.advice.endswith(": use terms=uv")
    assert not masked.use_uv  # which secure aggregation would refuse
    assert "terms=uv cannot be used here: privacy.secure_aggregation" in masked.advice
    assert masked.whole.distance == pytest.approx(plain.whole.distance, rel=1e-4)
    assert set(masked.sent) == set(plain.sent) == {0, 1, 2, 3}
    assert all(masked.sent[client] > plain.sent[client] for client in plain.sent)  # keys and shares


def test_what_is_sent_does_not_grow_with_the_images() -> None:
    few, many = (diagnose("data=digits", f"clients={count}") for count in (20, 2))
    dim = CONTENT + 9 * 3
    assert set(few.sent.values()) == set(many.sent.values()) == {8 * (1 + dim + dim * (dim + 1))}


def test_it_passes_the_contract() -> None:
    assert len(check_method(Diagnosis)) == len(CHECKS)


def test_labels_do_not_reach_it_whatever_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = []

    def watched(*given: Any) -> ClientRuntime:
        hosts.append(make_runtime(*given))
        return hosts[-1]

    monkeypatch.setattr("harmonium.studies.diagnosis.make_runtime", watched)
    words = ["data=digits", "split=dirichlet", "clients=4"]
    assert diagnose(*words, "objective=supervised") == diagnose("fedprox", *words)
    for host in hosts:
        assert not host.method.reads_labels and not host.images.labelled


def test_a_client_with_very_few_images_is_left_out_by_name() -> None:
    words = ["data=shapes", "data.count=200", "split=quantity", "split.min_size=1", "clients=20"]
    found = diagnose(*words, "split.alpha=0.3")
    assert found.silent and all("too few to hide" in why for why in found.silent.values())
    assert found.clients + len(found.silent) == 20 and not set(found.silent) & set(found.sent)


# ---- the advice ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("split", "verdict"),
    [
        (["split=dirichlet", "split.alpha=0.3"], "content"),
        (["split=joint", "split.alpha=0.3", "split.prior=false"], "content"),
        (["split=rotation"], "style"),
        (["split=styles"], "style"),
        (["split=iid"], "alike"),
    ],
)
def test_the_advice_fits_the_split(split: list[str], verdict: str) -> None:
    found = harmonium.diagnose(*SHAPES, *split, "clients=8", "seed=3")
    assert isinstance(found, Finding)
    assert found.verdict == verdict
    assert found.use_uv == (verdict == "content") == found.advice.endswith(": use terms=uv")
    assert (found.share is None) == (verdict == "alike")


def test_a_recipe_can_be_given_whole() -> None:
    recipe = Recipe.of("fedavg", "data=digits", "split=rotation", "clients=3")
    assert diagnose(recipe) == diagnose("data=digits", "split=rotation", "clients=3")


# ---- the command ---------------------------------------------------------------------------------


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """The command in this process: its exit code, what it prints and what it says beside."""

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["harmonium", "diagnose", *words])
        monkeypatch.setattr(sys, "path", list(sys.path))
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        said, told = capsys.readouterr()
        return code, said, told

    return call


def test_the_command_shows_evidence_and_advice(
    command: Callable[..., tuple[int, str, str]],
) -> None:
    code, said, _ = command("data=digits", "split=rotation", "clients=3")
    assert code == 0
    for words in ("images as they are", "content alone", "squared distance", "61,952 bytes"):
        assert words in said
    assert "do not use terms=uv" in said
    code, said, told = command("data=digits", "split=rotation", "clients=3", "--json")
    held = json.loads(said)
    assert (code, told, held["verdict"], held["use_uv"]) == (0, "", "style", False)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["data=digits", "clients=1"], "at least 2 are needed"),
        (["data=digits", "clients=400"], "0 of 400 clients answered"),
        ([*HIDDEN, "split=dirichlet"], "needs labels"),
        (["data=digits", "splot=iid"], "did you mean 'split'"),
        (["fedavg", "fedprox", "data=digits"], "name one method or recipe"),
        (["data=digits", "clients=2", "privacy.secure_aggregation=true"], "at least 3 clients"),
        (["data=digits", "data.limit=20", "clients=2"], "too few to compare"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    command: Callable[..., tuple[int, str, str]], words: list[str], why: str
) -> None:
    code, said, told = command(*words)
    (line,) = [line for line in told.splitlines() if line.startswith("harmonium: ")]
    assert (code, said) == (2, "") and why in line
    assert told.splitlines()[-1] == line  # before it there may be progress, on a slow machine


def test_the_commands_of_its_page_are_known() -> None:
    page = Path(__file__).parents[2] / "docs" / "diagnosis.md"
    commands = [
        line.split()[2:]
        for line in page.read_text(encoding="utf-8").splitlines()
        if line.startswith("harmonium diagnose ") and "=" in line
    ]
    assert len(commands) == 3
    for words in commands:
        assert Recipe.of("fedavg", *(word for word in words if "=" in word)).clients > 1


def test_a_run_of_it_can_be_read_again(
    tmp_path: Path,
    command: Callable[..., tuple[int, str, str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["data=shapes", "data.count=200", "data.size=16", "split=dirichlet", "clients=4"]
    settings = ["rounds=1", "evaluate.k=5", "evaluate.labels_per_class=[]", "engine.workers=0"]
    done = run("diagnosis", *words, *settings, out=tmp_path / "run")
    here, there = diagnose(*words), diagnose_run(tmp_path / "run")
    assert replace(there, notes=here.notes) == here
    show_result(done, as_json=False)
    assert f"finding  harmonium diagnose {done.folder}" in capsys.readouterr().out
    code, said, _ = command(str(tmp_path / "run"), "--json")
    assert code == 0 and json.loads(said)["verdict"] == here.verdict
    code, _, told = command(str(tmp_path))
    assert code == 2 and "holds no diagnosis" in told


def test_without_a_first_word_the_method_may_be_named() -> None:
    few = {"data.limit": 100, "clients": 2}
    assert diagnose("method=fedprox", **few) == diagnose(method="fedprox", **few)
