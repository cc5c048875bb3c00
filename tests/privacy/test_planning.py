"""Plans of noise: the published rows of FedSC, both ways, and other accountants."""

import math
import random
from pathlib import Path

import pytest

import harmonium.privacy
from harmonium.core.errors import ConfigError
from harmonium.privacy.budget import epsilon
from harmonium.privacy.library import epsilon_pld
from harmonium.privacy.planning import plan, plan_from
from harmonium.recipe.schema import Recipe

# delta, mu, sigma, releases, images; epsilon by RDP for an image removed and replaced, exact
ROWS = [
    (1e-2, 2, 0.0034, 100, 10_000, 1.96, 2.87, 1.81),
    (1e-2, 2, 0.0018, 100, 10_000, 3.99, 6.00, 4.29),
    (1e-4, 2, 0.0048, 100, 10_000, 1.88, 2.70, 2.05),
    (1e-4, 2, 0.0018, 100, 10_000, 5.39, 7.98, 6.57),
    (1e-2, 4, 0.010, 50, 5_000, 1.88, 2.75, 1.72),
    (1e-2, 4, 0.0052, 50, 5_000, 3.89, 5.85, 4.16),
    (1e-4, 4, 0.012, 50, 5_000, 2.13, 3.08, 2.37),
    (1e-4, 4, 0.0051, 50, 5_000, 5.38, 7.96, 6.56),
    (1e-2, 5, 0.013, 50, 2_500, 3.89, 5.85, 4.16),
    (1e-2, 5, 0.0075, 50, 2_500, 7.50, 11.65, 9.05),
    (1e-4, 5, 0.040, 50, 2_500, 1.58, 2.27, 1.70),
    (1e-4, 5, 0.013, 50, 2_500, 5.26, 7.79, 6.40),
]


@pytest.mark.parametrize("row", ROWS)
def test_published_noise_is_worth_what_it_is(row: tuple[float, ...]) -> None:
    delta, mu, sigma, rounds, examples, removed, replaced, exact = row
    given = {"delta": delta, "rounds": int(rounds), "examples": int(examples), "mu": mu}
    found = plan(sigma=sigma, **given)  # type: ignore[arg-type]
    proof = plan(sigma=sigma, neighbours="add-remove", **given)  # type: ignore[arg-type]
    assert proof.rdp == pytest.approx(removed, abs=0.005)
    assert found.rdp == pytest.approx(replaced, abs=0.005)
    assert found.epsilon == pytest.approx(exact, abs=0.005)
    assert found.sensitivity == pytest.approx(math.sqrt(2) * mu / examples)
    back = plan(epsilon=found.epsilon, **given)  # type: ignore[arg-type]
    assert back.sigma == pytest.approx(sigma, rel=1e-6)


def test_it_tells_noise_and_signal_apart() -> None:
    """The norm of noise grows with the width of projections, that of a matrix does not."""
    found = plan(sigma=0.0052, rounds=50, examples=5000, mu=4, dim=512, delta=1e-5)
    assert found.noise_norm == pytest.approx(2.66, abs=0.01)
    assert found.kept_norm == pytest.approx(0.0052 * math.sqrt(512 * 513 / 2))
    assert found.each == pytest.approx(epsilon([{"sensitivity": 1, "sigma": 4.596}], 1e-5), 1e-3)
    assert not any("larger than any signal" in note for note in found.notes)
    loud = plan(epsilon=3, rounds=200, examples=5000, mu=4, dim=512)
    assert any("larger than any signal" in note for note in loud.notes)
    assert loud.epsilon == pytest.approx(3.0) and loud.rdp > 3.0 > loud.each
    assert any(
        "is not below 1 / 50 examples" in n for n in plan(epsilon=1, delta=0.1, examples=50).notes
    )
    assert plan(multiplier=4.0, rounds=9).epsilon == pytest.approx(
        epsilon([{"sensitivity": 1.0, "sigma": 4 / 3}], 1e-5)
    )


def test_more_rounds_take_more_noise_and_more_images_less() -> None:
    few, many = (plan(epsilon=3, rounds=r, examples=5000, mu=4).sigma for r in (50, 200))
    assert few and many and many == pytest.approx(2 * few)
    half = plan(epsilon=3, rounds=50, examples=10_000, mu=4).sigma
    assert half == pytest.approx(few / 2)


@pytest.mark.parametrize("seed", range(9))
def test_a_library_says_the_same(seed: int) -> None:
    """Never below, and at most a hundredth above, on random histories with both kinds of noise."""
    pytest.importorskip("dp_accounting")
    rng = random.Random(seed)
    made = [
        {
            "mechanism": "gaussian",
            "sensitivity": rng.choice([0.5, 1.0]),
            "scale": rng.uniform(2, 30),
            "count": rng.randint(1, 60),
            "neighbours": rng.choice(["replace", "add-remove"]),
        }
        for _ in range(rng.randint(1, 3))
    ]
    if seed % 4 == 0:
        made.append({"mechanism": "discrete-laplace", "sensitivity": 1, "scale": 20.0, "count": 30})
    delta = 10 ** -rng.uniform(2, 7)
    ours, theirs = epsilon(made, delta), epsilon_pld(made, delta)
    assert theirs is not None
    assert ours <= theirs + 1e-3 and theirs <= 1.01 * ours + 1e-3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["epsilon=3", "sigma=1"],
            "give one of epsilon, sigma and multiplier; there is epsilon and",
        ),
        ([], "there is none of them"),
        (["epsilon=-3"], "epsilon is -3.0"),
        (["sigma=1"], "give examples and mu, too"),
        (["epsilon=3", "round=4"], "'round=4' is not a setting of a plan: did you mean 'rounds'"),
        (["epsilon=three"], "epsilon=three"),
        (["epsilon=3", "rounds=1.5"], "rounds=1.5"),
        (["epsilon=3", "neighbours=both"], "neighbours=both"),
        (["epsilon=3", "delta=2"], "delta is 2.0"),
    ],
)
def test_wrong_words_are_one_clear_line(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_from(words)


def test_what_cannot_be_used_is_said() -> None:
    (said, _) = plan_from(["epsilon=3", "examples=5000", "dim=8"]).notes
    assert "examples and dim" in said and said.endswith("needs mu")
    assert len(plan_from(["epsilon=3", "examples=5000", "mu=4"]).notes) == 1


def test_words_and_names_say_the_same() -> None:
    words = ["epsilon=3", "delta=1e-5", "rounds=200", "examples=5000", "mu=4", "dim=512"]
    named = harmonium.privacy.plan(epsilon=3, rounds=200, examples=5000, mu=4, dim=512)
    assert plan_from(words) == named
    assert named.pld is None or named.pld == pytest.approx(3.0, rel=0.01)
    with pytest.raises(AttributeError, match="no attribute 'plans'"):
        harmonium.privacy.plans  # noqa: B018


def test_the_commands_of_the_page_on_privacy_are_right() -> None:
    page = Path(__file__).parents[2] / "docs" / "privacy.md"
    if not page.exists():
        pytest.skip("not a checkout")
    lines = [
        line.split() for line in page.read_text().splitlines() if line.startswith("harmonium ")
    ]
    runs = [Recipe.of(*words[2:]) for words in lines if words[1] == "run"]
    plans = [plan_from(words[3:]) for words in lines if words[1:3] == ["privacy", "plan"]]
    assert len(runs) == 2 and len(plans) == 2
    assert runs[0].privacy.updates and runs[1].local.dp_noise
