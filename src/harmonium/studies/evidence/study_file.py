"""A study as its file describes it: a claim, the regime in which it is tested, and the rule.

The file says everything that decides before anything runs: arms, one grid for all of them, the
seeds of each stage, and the differences that the claim predicts. `recipe/library/studies/` has the
studies that come with Harmonium; `docs/evidence.md` explains every key.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from harmonium.core.errors import ConfigError, counted, shown, suggest
from harmonium.measures import Headline, measures
from harmonium.measures.evaluation import measures_of
from harmonium.recipe.presets import about, entry, read_yaml, studies
from harmonium.recipe.schema import Recipe
from harmonium.report.metric_names import PROBES
from harmonium.studies.comparison.cells import BY_ITSELF, SUPERVISED, reference

OBJECTIVE, GRADIENT = "objective", "gradient_norm"
LESS_IS_BETTER = (OBJECTIVE, GRADIENT)
RANK = "rank"  # the effective rank of the final features
OTHERS = "*"  # of `measures`: rows that have no words of their own
REFERENCES = (*BY_ITSELF, SUPERVISED)
STAGES = ("headroom", "tuning", "deciding")
KEYS = (
    "claim", "paper", "system", "published", "regime", "arms", "references", "conditions", "vary",
    "grid", "seeds", "tuning", "headroom", "measures", "rule", "differs", "looked_at",
)  # fmt: skip


@dataclass(frozen=True)
class RuleLine:
    """One line of the rule: an arm leads another by more than a margin.

    A negative margin states that the arm is less than that much worse.
    """

    better: str
    than: str
    by: str  # the figure
    margin: float  # points of accuracy; of an objective, its own unit
    conditions: tuple[str, ...]
    less_is_better: bool = False  # of a figure of a measure

    @property
    def sign(self) -> int:
        """-1 where less of the figure is better."""
        return -1 if self.less_is_better or self.by in LESS_IS_BETTER else 1

    @property
    def text(self) -> str:
        """The line in words."""
        if self.margin == 0:
            return f"{self.better} leads {self.than} ({self.by})"
        if self.margin > 0:
            return (
                f"{self.better} is more than {self.margin:g} better than {self.than} by {self.by}"
            )
        return f"{self.better} is less than {-self.margin:g} worse than {self.than} by {self.by}"


@dataclass(frozen=True)
class HeadroomRule:
    """What a regime must show before a claim is decided in it."""

    by: str = "linear"
    below: str = ""  # the arm that leaves a gap; empty: the first
    above: str = "centralised"  # the arm that shows what can be reached
    flat: float = 1.0  # points of validation kNN by which a curve may change in its last quarter


@dataclass(frozen=True)
class StudyFile:
    """A study, checked; `recipe` gives the run of every cell."""

    name: str
    title: str
    claim: str
    paper: str
    system: str  # what the claim is about, as the table of all studies groups them
    published: tuple[str, ...]  # rows of papers' tables
    regime: tuple[str, ...]
    arms: Mapping[str, tuple[str, ...]]  # a method or recipe and its words, by name
    references: Mapping[str, tuple[str, ...]]  # words of their own, by name
    conditions: Mapping[str, tuple[str, ...]]
    vary: tuple[str, ...]  # keys whose combinations are the conditions; empty: they have names
    grid: Mapping[str, tuple[str, ...]]
    seeds: Mapping[str, tuple[int, ...]]  # by stage
    tuned_by: str  # `knn` of validation images, or label-free: `score`, `objective`
    tuned_in: str  # the condition in which all settings are chosen; empty: in each its own
    headroom: HeadroomRule | None
    measures: Mapping[str, tuple[str, ...]]  # words of `harmonium eval` for every row
    headlines: Mapping[str, Headline]  # the figures of these measures
    rule: tuple[RuleLine, ...]
    differs: tuple[str, ...]
    looked_at: tuple[str, ...]
    text: str  # the file itself

    @property
    def digest(self) -> str:
        """Identifies the file's text."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def rows(self) -> tuple[str, ...]:
        """Arms and references that are trained, in the order of tables."""
        return (*self.arms, *self.references)

    @property
    def settings(self) -> list[tuple[str, ...]]:
        """Every point of the grid as words; one point without words where there is no grid."""
        axes = [[f"{key}={value}" for value in values] for key, values in self.grid.items()]
        return list(itertools.product(*axes))

    @property
    def in_short(self) -> str:
        """The regime in a few words."""
        condition, arm = next(iter(self.conditions)), next(iter(self.arms))
        recipe = self.recipe(condition, arm, self.settings[0], 0)
        parts = [
            recipe.data.name,
            counted(recipe.clients, "client"),
            counted(recipe.rounds, "round"),
            counted(len(self.seeds["deciding"]), "deciding seed"),
        ]
        named = [one for one in self.conditions if one] or [f"split {recipe.split.name}"]
        few = named if len(named) <= 4 else [counted(len(named), "condition")]
        return f"{', '.join(parts)}; {'; '.join(few)}"

    def less_is_better(self, figure: str) -> bool:
        """Whether a row leads with less of a figure."""
        known = self.headlines.get(figure)
        return known.less_is_better if known else figure in LESS_IS_BETTER

    def measured_by(self, row: str, stage: str) -> tuple[str, ...]:
        """The words by which runs of a row are measured in a stage; none where none is needed.

        Deciding runs are measured always, others where their stage goes by such a figure, those
        of the tuning stage on validation images.
        """
        words = self.measures.get(row, ())
        if stage == "tuning" and self.tuned_by in self.headlines:
            names = [word for word in words if "=" not in word]
            validation = [f"{name}.part=validation" for name in names if _has_part(name)]
            return tuple(_latest([*words, *validation]))
        by = self.headroom.by if self.headroom else ""
        return (
            words if stage == "deciding" or (stage == "headroom" and by in self.headlines) else ()
        )

    def decided_in(self, condition: str) -> bool:
        """Whether a line of the rule is about this condition; others are only shown."""
        return any(condition in line.conditions for line in self.rule)

    def recipe(self, condition: str, row: str, setting: Sequence[str], seed: int) -> Recipe:
        """The recipe of one cell. Words of an arm win over the grid's, and those over the regime's.

        A setting of the grid that an arm does not have, such as the learning rate of a server that
        averages, is refused by the recipe; the grid is one for all.
        """
        shared = [*self.regime, *self.conditions[condition]]
        if row in self.arms:
            name, *own = self.arms[row]
            return Recipe.of(name, *_latest([*shared, *setting, *own, f"seed={seed}"]))
        base = self.recipe(condition, next(iter(self.arms)), setting, seed)
        if row == SUPERVISED:
            labelled = {"objective": "supervised", "terms": {}}
            made = reference(base, "centralised", **labelled)
            made = Recipe.of(made, "split.labels=1.0")
        else:
            made = reference(base, row)
        return Recipe.of(made, *_latest([*setting, *self.references[row]]))


def read_study(what: str) -> StudyFile:
    """A study by its name or file; slips are refused in one line before anything runs."""
    path = Path(what)
    if path.suffix in (".yaml", ".yml"):
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot read study {what}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"study {what} is not text in UTF-8") from None
        comments = [one.lstrip("# ") for one in text.splitlines() if one.startswith("#")]
        title, paper = (*comments, "", "")[:2]
        return _checked(path.stem, title.rstrip("."), paper, text, read_yaml(text, what))
    known = studies()
    if what not in known:
        raise ConfigError(f"no study is called '{what}': {suggest(what, known)}")
    text = known[what].read_text(encoding="utf-8")
    title, paper = about(known[what])
    return _checked(what, title.rstrip("."), paper, text, read_yaml(text, what))


def _checked(name: str, title: str, paper: str, text: str, tree: Mapping[str, Any]) -> StudyFile:
    """The study with every part checked, and the recipe of every arm read once."""
    for key in tree:
        if key not in KEYS:
            raise ConfigError(f"study {name}: unknown key '{key}': {suggest(key, KEYS)}")
    for key in ("claim", "regime", "arms", "seeds"):
        if not tree.get(key):
            needed = "a study needs claim, regime, arms, seeds"
            raise ConfigError(f"study {name} has no {key}: {needed}")
    arms = {arm: _words(words) for arm, words in _mapping(name, "arms", tree["arms"]).items()}
    if empty := [arm for arm, words in arms.items() if not words]:
        raise ConfigError(f"study {name}: arm {empty[0]} names no method or recipe")
    references = _references(name, tree.get("references", ["centralised"]))
    if both := sorted(set(arms) & set(REFERENCES)):
        raise ConfigError(f"study {name}: {both[0]} is a reference and cannot name an arm")
    conditions, rows = _conditions(name, tree), (*arms, *references)
    measured_by, headlines = _measures(name, tree.get("measures"), rows)
    headroom = None
    if tree.get("headroom") is not None:
        headroom = _headroom(name, tree["headroom"], rows, headlines)
    rule = _rule(name, tree.get("rule") or [], rows, tuple(conditions), headlines)
    if rule and headroom is None:
        raise ConfigError(f"study {name} has a rule but no `headroom` section: add one")
    tuning = _mapping(name, "tuning", tree.get("tuning") or {})
    grid = _axes(name, "grid", tree.get("grid") or {})
    study = StudyFile(
        name=name,
        title=title,
        claim=" ".join(str(tree["claim"]).split()),
        paper=tree.get("paper", paper),
        system=str(tree.get("system") or (rule[0].better if rule else list(arms)[-1])),
        published=tuple(tree.get("published") or ()),
        regime=_words(tree["regime"]),
        arms=arms,
        references=references,
        conditions=conditions,
        vary=tuple(map(str, tree.get("vary") or ())),
        grid=grid,
        seeds=_seeds(name, tree["seeds"], with_grid=bool(grid), decides=bool(rule)),
        tuned_by=tuning.get("by", "knn"),
        tuned_in=tuning.get("in", ""),
        headroom=headroom,
        measures=measured_by,
        headlines=headlines,
        rule=rule,
        differs=_sentences(tree.get("differs")),
        looked_at=_sentences(tree.get("looked_at")),
        text=text,
    )
    _check_parts(study)
    return study


def _check_parts(study: StudyFile) -> None:
    """Refuse unknown names, and arms whose recipes cannot be read or are the same."""
    _check_tuning(study)
    for row in study.published:
        if entry(row) is None:
            raise ConfigError(f"study {study.name}: published names no row of a table: {row}")
    seed = next(iter(study.seeds.values()))[0]
    for condition in study.conditions:
        known: dict[tuple[str, tuple[str, ...]], str] = {}  # by recipe and measures
        for row in study.rows:
            for setting in study.settings:
                try:
                    recipe = study.recipe(condition, row, setting, seed)
                except ConfigError as error:
                    where = ", ".join(filter(None, [row, condition]))
                    raise ConfigError(f"study {study.name}, {where}: {error}") from None
            other = known.setdefault((recipe.digest, study.measures.get(row, ())), row)
            if other != row:
                raise ConfigError(f"study {study.name}: {other} and {row} are the same recipe")


def _check_tuning(study: StudyFile) -> None:
    """Refuse a figure that cannot be had on validation images for every row, and unknown names."""
    choices = ["knn", "score", OBJECTIVE, *study.headlines]
    if study.tuned_by not in choices:
        close = suggest(study.tuned_by, choices)
        raise ConfigError(f"study {study.name}: tuning.by is {study.tuned_by}: {close}")
    for row in study.rows if study.tuned_by in study.headlines else ():
        chosen = measures_of(study.measures.get(row, ()))
        able = [one for name, one in chosen.items() if _has_part(name)]
        if not any(study.tuned_by in one.headlines() for one in able):
            raise ConfigError(
                f"study {study.name}: tuning.by is {study.tuned_by}, which {row} does not have on "
                "validation images"
            )
    if study.tuned_in and study.tuned_in not in study.conditions:
        close = suggest(study.tuned_in, study.conditions)
        raise ConfigError(f"study {study.name}: tuning.in is {study.tuned_in}: {close}")


def _has_part(measure: str) -> bool:
    """Whether a measure can be computed on validation images."""
    return any(one.name == "part" for one in fields(measures[measure]))


def _measures(
    name: str, given: Any, rows: Sequence[str]
) -> tuple[dict[str, tuple[str, ...]], dict[str, Headline]]:
    """The words of measures for every row, and the figures that come of them.

    Given are words for all rows, or a mapping from rows to words, in which `*` is for the others.
    """
    if not given:
        return {}, {}
    tree = _mapping(name, "measures", given if isinstance(given, Mapping) else {OTHERS: given})
    for row in tree:
        _known_row(name, "measures", row, (*rows, OTHERS))
    words = {row: _words(tree.get(row, tree.get(OTHERS))) for row in rows}
    headlines: dict[str, Headline] = {}
    for row in rows:
        for measure, settings in measures_of(words[row]).items():
            if not (figures := settings.headlines()):
                raise ConfigError(f"study {name}: measures: {measure} gives no figure for a study")
            headlines |= figures
    return words, headlines


def _words(given: Any) -> tuple[str, ...]:
    """Words of a command: a text with blanks between them, or a list."""
    return tuple(given.split() if isinstance(given, str) else (str(word) for word in given or ()))


def _sentences(given: Any) -> tuple[str, ...]:
    """Sentences of a list, or one sentence, each on one line however it is written in the file."""
    listed = [given] if isinstance(given, str) else given or ()
    return tuple(" ".join(str(one).split()) for one in listed)


def _latest(words: Sequence[str]) -> list[str]:
    """Words of which each key is given once, as it was given last.

    >>> _latest(["rounds=3", "local.lr=1", "rounds=5"])
    ['rounds=5', 'local.lr=1']
    """
    return list({word.partition("=")[0]: word for word in words}.values())


def _mapping(name: str, key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"study {name}: {key} must be a mapping from names to values")
    return {str(one): its for one, its in value.items()}


def _axes(name: str, section: str, given: Any) -> dict[str, tuple[str, ...]]:
    """Values of every key of a grid, as words show them."""
    axes = _mapping(name, section, given)
    for key, values in axes.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"study {name}: {section}.{key} must be a list of values")
    return {key: tuple(shown(value) for value in values) for key, values in axes.items()}


def _references(name: str, given: Any) -> dict[str, tuple[str, ...]]:
    """References with words of their own: a list of names, or a mapping from names to words."""
    found = dict.fromkeys(given) if isinstance(given, list) else _mapping(name, "references", given)
    for reference_name in found:
        if reference_name not in REFERENCES:
            close = suggest(reference_name, REFERENCES)
            raise ConfigError(f"study {name}: no reference is called '{reference_name}': {close}")
    return {str(one): _words(words) for one, words in found.items()}


def _conditions(name: str, tree: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Conditions by name, or every combination of the values in `vary`; one where neither is."""
    if tree.get("vary"):
        if tree.get("conditions"):
            raise ConfigError(f"study {name} has conditions and vary: leave one out")
        varied = _axes(name, "vary", tree["vary"])
        axes = [[f"{key}={value}" for value in values] for key, values in varied.items()]
        return {", ".join(words): words for words in itertools.product(*axes)}
    given = _mapping(name, "conditions", tree.get("conditions") or {"": ""})
    return {one: _words(words) for one, words in given.items()}


def _headroom(
    name: str, given: Any, rows: Sequence[str], headlines: Mapping[str, Headline]
) -> HeadroomRule:
    keys = ("by", "below", "above", "flat")
    tree = _mapping(name, "headroom", given)
    for key in tree:
        if key not in keys:
            raise ConfigError(f"study {name}: unknown key 'headroom.{key}': {suggest(key, keys)}")
    flat = _number(name, "headroom.flat", tree.get("flat", HeadroomRule.flat))
    requirements = HeadroomRule(**{"below": rows[0], **tree, "flat": flat})
    for row in (requirements.below, requirements.above):
        _known_row(name, "headroom", row, rows)
    _known_figure(name, "headroom.by", requirements.by, headlines)
    return requirements


def _rule(
    name: str,
    given: Any,
    rows: Sequence[str],
    conditions: tuple[str, ...],
    headlines: Mapping[str, Headline],
) -> tuple[RuleLine, ...]:
    lines = []
    keys = ("better", "than", "by", "margin", "in")
    for line in given if isinstance(given, list) else [given]:
        if not isinstance(line, Mapping):
            raise ConfigError(
                f"study {name}: a line of the rule names better, than and by, but one is {line!r}"
            )
        tree = _mapping(name, "rule", line)
        for key in tree:
            if key not in keys:
                raise ConfigError(f"study {name}: unknown key 'rule.{key}': {suggest(key, keys)}")
        for key in ("better", "than", "by"):
            if key not in tree:
                raise ConfigError(f"study {name}: a line of the rule has no '{key}'")
        for key in ("better", "than"):
            _known_row(name, f"rule.{key}", tree[key], rows)
        _known_figure(name, "rule.by", tree["by"], headlines)
        chosen = tree.get("in", list(conditions))
        chosen = tuple(chosen if isinstance(chosen, list) else [chosen])
        for condition in chosen:
            if condition not in conditions:
                close = suggest(str(condition), conditions) if any(conditions) else "it has none"
                raise ConfigError(f"study {name}: rule.in names no condition: {condition}: {close}")
        margin = _number(name, "rule.margin", tree.get("margin", 0))
        if tree["better"] == tree["than"]:
            raise ConfigError(f"study {name}: a line of the rule compares {tree['than']} to itself")
        less = tree["by"] in headlines and headlines[tree["by"]].less_is_better
        lines.append(RuleLine(tree["better"], tree["than"], tree["by"], margin, chosen, less))
    return tuple(lines)


def _number(name: str, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"study {name}: {key} is {value!r}; it must be a number")
    return float(value)


def _known_row(name: str, key: str, row: str, rows: Sequence[str]) -> None:
    if row not in rows:
        raise ConfigError(f"study {name}: {key} names no arm: '{row}': {suggest(row, rows)}")


def _known_figure(name: str, key: str, figure: str, headlines: Mapping[str, Headline]) -> None:
    kind, _, count = figure.partition("_")
    known = [*PROBES, "linear_10", RANK, OBJECTIVE, GRADIENT, *headlines]
    if figure not in known and not (kind in PROBES and count.isdigit()):
        raise ConfigError(f"study {name}: {key} is {figure}: {suggest(figure, known)}")


def _seeds(name: str, given: Any, *, with_grid: bool, decides: bool) -> dict[str, tuple[int, ...]]:
    """Seeds by stage; none is used by two stages."""
    tree = _mapping(name, "seeds", given)
    wanted = [
        stage
        for stage in STAGES
        if stage == "deciding" or (stage == "tuning" and with_grid) or (decides and stage in tree)
    ]
    if decides:
        wanted = [stage for stage in STAGES if stage in wanted or stage == "headroom"]
    seeds: dict[str, tuple[int, ...]] = {}
    used: dict[int, str] = {}
    for stage in wanted:
        values = tree.get(stage)
        if not isinstance(values, list) or not values or not all(type(v) is int for v in values):
            raise ConfigError(f"study {name}: seeds.{stage} must be a list of whole numbers")
        for seed in values:
            if used.setdefault(seed, stage) != stage:
                raise ConfigError(f"study {name}: seed {seed} is used for {used[seed]} and {stage}")
        if len(set(values)) < len(values):
            raise ConfigError(f"study {name}: seeds.{stage} names a seed twice")
        seeds[stage] = tuple(values)
    for stage in tree:
        if stage not in STAGES:
            raise ConfigError(
                f"study {name}: unknown key 'seeds.{stage}': {suggest(stage, STAGES)}"
            )
    if decides and len(seeds["deciding"]) < 2:
        raise ConfigError(f"study {name}: seeds.deciding has one seed; a test needs two or more")
    return seeds
