"""Names of losses in tables of global objectives: the same name means the same loss.

Two settings of one objective, such as FedSC's form of the spectral contrast beside HaoChen's, are
different losses, and so is one objective with different views: their values cannot be compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from harmonium.core.errors import shown
from harmonium.core.settings import plain
from harmonium.recipe.schema import Recipe
from harmonium.studies.comparison.outcomes import Outcomes


def losses(recipes: Mapping[str, Recipe]) -> dict[str, str]:
    """The loss of every row: its objective, and the settings in which it differs from others.

    >>> first, second = (Recipe.of("fedspectral", f"objective.mu={mu}") for mu in (1, 4))
    >>> losses({"first": first, "second": second})
    {'first': 'spectral (mu=1)', 'second': 'spectral (mu=4)'}
    >>> losses({"first": first, "again": first})
    {'first': 'spectral', 'again': 'spectral'}
    """
    known = {label: _settings(recipe) for label, recipe in recipes.items()}
    named = {}
    for label, its in known.items():
        alike = [one for one in known.values() if one["objective"] == its["objective"]]
        keys = dict.fromkeys(key for one in alike for key in one)
        apart = [key for key in keys if len({json.dumps(one.get(key)) for one in alike}) > 1]
        words = ", ".join(f"{key}={_text(its.get(key))}" for key in apart)
        named[label] = its["objective"] + (f" ({words})" if words else "")
    return named


def measured_losses(outcomes: Outcomes) -> dict[str, str]:
    """The losses of the rows whose global objective was measured, in their order."""
    known = {label for label, _ in outcomes.objectives}
    return losses({label: one for label, one in outcomes.plan.rows.items() if label in known})


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else shown(value)


def _settings(recipe: Recipe) -> dict[str, Any]:
    """The settings that determine a loss, flat, the objective's name first."""
    objective = plain(recipe.objective)
    name = objective.pop("name", "") or "an objective of your own"
    settings = {"objective": name, **objective, "views": recipe.views.name}
    settings |= {f"views.{key}": value for key, value in plain(dict(recipe.views.changes)).items()}
    if not recipe.objective.pooled:  # a bound by user verification depends on the term
        for term in map(plain, recipe.terms):
            settings |= {
                f"terms.{term['name']}.{key}": v for key, v in term.items() if key != "name"
            }
    return settings
