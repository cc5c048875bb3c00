"""Diagnosis of a split from clients' sums: do clients differ in content or in style?

If clients differ only by changes that content descriptors ignore (rotation, mirroring, colour,
brightness, contrast), their content has the same distribution. So clients are compared twice, by
all descriptors and by content alone, and content's share of the distance decides. A style that
also changes content can still be recognised: clients with different shares of the same classes
differ along directions in which the images of one client vary, too. A style does not vary within a
client.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from harmonium.core.errors import ConfigError
from harmonium.data.partition import make_split
from harmonium.engines.local import LocalEngine
from harmonium.federation.driver import Driver
from harmonium.federation.ledger import Ledger
from harmonium.federation.method import Server
from harmonium.methods.diagnosis import Diagnosis, sums_of
from harmonium.methods.diagnosis.features import CONTENT
from harmonium.methods.diagnosis.scatter import Spread, Sums, spread
from harmonium.recipe.schema import Recipe
from harmonium.runs.open_run import make_runtime, read_recipe
from harmonium.storage.run_folder import RunFolder

CHANCE = 4.0  # scores below it may be chance
SHARE = 0.1  # least share of the distance that is due to content; see docs/results/diagnosis.md
SEEN = 0.5  # squared distance that must be detectable for the verdict "alike"
WIDTH = 1.0  # least width of the directions along which content differs, relative to the mean
SECTIONS = ("data", "split", "clients", "seed", "privacy")  # of a recipe; others do not matter

Verdict = Literal["alike", "content", "style", "unclear"]


@dataclass(frozen=True)
class Finding:
    """The difference between the clients of a split, and the advice on user verification."""

    verdict: Verdict
    clients: int  # that answered
    images: int
    whole: Spread  # distances between clients by all descriptors
    content: Spread  # distances by content alone
    sent: Mapping[int, int]  # client -> bytes up
    silent: Mapping[int, str]  # client -> why it did not answer
    notes: tuple[str, ...] = ()  # on the data
    refused: str = ""  # why the other settings do not allow terms=uv; empty: they do

    @property
    def share(self) -> float | None:
        """Content's share of the distance; none where the distance is within chance."""
        return share(self.whole, self.content)

    @property
    def use_uv(self) -> bool:
        """Whether user verification is advised."""
        return self.verdict == "content" and not self.refused

    @property
    def advice(self) -> str:
        """The advice in one line."""
        if self.refused and self.verdict == "content":
            return f"clients differ in content, but terms=uv cannot be used here: {self.refused}"
        if self.refused and self.verdict == "unclear":
            return f"it is not clear; terms=uv cannot be used here anyway: {self.refused}"
        return ADVICE[self.verdict]

    def plain(self) -> dict[str, Any]:
        """The finding as plain values, for JSON."""
        return {
            **asdict(self),
            "share": self.share,
            "use_uv": self.use_uv,
            "advice": self.advice,
            "sentences": self.sentences(),
        }

    def sentences(self) -> list[str]:
        """The evidence in sentences."""
        apart, left = (max(one.distance, 0.0) ** 0.5 for one in (self.whole, self.content))
        if self.share is None:
            least = (CHANCE * max(self.whole.error, self.content.error)) ** 0.5
            lines = ["Clients differ by no more than chance, in content as in style."]
            if self.verdict == "unclear":
                lines.append(
                    "But images are few: clients would have to lie "
                    f"{least:.1f} standard deviations apart to be distinguished from chance."
                )
            return lines
        lines = [
            f"A client's images lie {apart:.2f} standard deviations from the mean of all; without "
            f"rotation, mirroring, colour, brightness and contrast, {left:.2f}."
        ]
        lines.append(f"Content is {self.share:.0%} of the squared distance. {self._why()}")
        return lines

    def _why(self) -> str:
        some = "content differs, too, but style dominates" if self.content.score > CHANCE else ""
        if self.verdict == "unclear" and (self.share or 0) >= SHARE:
            return (
                f"But clients lie apart where the images of one client vary little (width below "
                f"{WIDTH:g}), as with styles such as a texture, or single classes far apart."
            )
        return {
            "alike": "",
            "content": f"At least {SHARE:.0%} means that clients differ in content.",
            "style": f"Below {SHARE:.0%}, clients differ in style{some and f'; {some}'}.",
            "unclear": "There are too few images to measure so small a share.",
        }[self.verdict]


ADVICE: Mapping[Verdict, str] = {
    "alike": "clients look alike: user verification does not matter, leave it out",
    "content": "clients differ in content: use terms=uv",
    "style": "clients differ in style: do not use terms=uv",
    "unclear": "it is not clear: leave terms=uv out, or try a run with and one without",
}


def share(whole: Spread, content: Spread) -> float | None:
    """Content's share of the distance, between 0 and 1; none where nothing is beyond chance.

    Differences in content are also differences in all descriptors, so the larger of the two
    distances is the whole.
    """
    if max(whole.score, content.score) < CHANCE:
        return None
    return max(content.distance, 0.0) / max(whole.distance, content.distance)


def verdict_of(whole: Spread, content: Spread, least: float = SHARE) -> Verdict:
    """The verdict from both comparisons; `least` is the least share of content.

    >>> apart, alike = Spread(1.0, 0.02, 90.0, 60), Spread(0.0, 0.01, 0.3, 60)
    >>> verdict_of(alike, alike), verdict_of(apart, alike), verdict_of(apart, apart)
    ('alike', 'style', 'content')
    """
    part = share(whole, content)
    if part is None:
        seen = CHANCE * max(whole.error, content.error) <= SEEN
        return "alike" if seen else "unclear"
    if part >= least and content.score >= CHANCE:
        return "content" if content.width >= WIDTH else "unclear"
    most = content.distance + 2 * content.error
    return "style" if most < least * whole.distance else "unclear"


def finding(sums: Sums, **facts: Any) -> Finding:
    """The finding that follows from the sums."""
    whole, content = spread(sums), spread(sums.part(slice(CONTENT)))
    verdict = verdict_of(whole, content)
    return Finding(verdict, sums.groups, sums.images, whole, content, **facts)


def diagnose(recipe: Recipe | str | None = None, *words: str, **settings: Any) -> Finding:
    """Ask the clients of a recipe for sums, and determine how they differ. No label is used.

    Args:
        recipe: a recipe, its name or file, of which only data, split, clients, seed and privacy
            matter; or the first of the settings. Without it, settings change the defaults.
        words: settings as on the command line, e.g. `"split=rotation"`.
        settings: settings by name, e.g. `clients=5`; `data` may be arrays.

    Returns:
        Whether clients differ in content or in style, and the advice that follows.

    >>> import harmonium
    >>> finding = harmonium.diagnose("data=digits", "split=rotation", clients=3)
    >>> isinstance(finding.advice, str)
    True
    """
    if isinstance(recipe, str) and "=" in recipe:
        words, recipe = (recipe, *words), None
    asked = Recipe.of(recipe or Recipe.from_tree({}), *words, **settings)
    if asked.training < 2:
        raise ConfigError(f"clients is {asked.training}; to compare clients, at least 2 are needed")
    _ = asked.engine.devices  # a device that is not here is refused before images are read
    sections = {key: getattr(asked, key) for key in SECTIONS}
    sections["privacy"] = replace(asked.privacy, epsilon=None)  # its sums have no noise
    plain = Recipe.from_tree({**sections, "method": Diagnosis, "rounds": 1})
    dataset = plain.data.load()
    split = make_split(plain.split, dataset, None, plain.clients, plain.seed)
    ledger = Ledger()
    with tempfile.TemporaryDirectory() as folder:
        host = make_runtime(plain, dataset, split, Path(folder))
        with LocalEngine(host, Path(folder), 0, asked.engine.devices[:1]) as engine:
            driver = Driver(host.method, engine, ledger, quorum=2, masks=plain.privacy.masks)
            server = Server(split.examples, host.method.blueprint.shared(), round=1)
            server = driver.drive(host.method.run_plan(server, server.everyone), server)
    entries = [json.loads(line) for line in ledger.lines]
    notes = (*dataset.notes, *split.notes)
    return finding(sums_of(server), **_traffic(entries), notes=notes, refused=_refused(asked))


def diagnose_run(folder: str | Path) -> Finding:
    """The same from a run of the method `diagnosis`, such as one at real sites."""
    run_folder = RunFolder(Path(folder))
    commit = run_folder.newest(with_states=False)
    if commit is None or "sums" not in commit.server["memory"]:
        raise ConfigError(
            f"{folder} holds no diagnosis: run one, e.g. with harmonium server start diagnosis "
            "rounds=1"
        )
    server = Server({}, **commit.server)
    recipe = read_recipe(Path(folder))
    tree = {key: getattr(recipe, key) for key in SECTIONS}
    tree["privacy"] = replace(recipe.privacy, epsilon=None)
    traffic = _traffic(run_folder.read_log("ledger.jsonl"))
    return finding(sums_of(server), **traffic, refused=_refused(tree))


def _refused(recipe: Recipe | dict[str, Any]) -> str:
    """Why a recipe, or one with these sections, allows no user verification; empty: it does."""
    try:
        Recipe.of(Recipe.from_tree(recipe) if isinstance(recipe, dict) else recipe, "terms=uv")
    except ConfigError as error:
        return str(error)
    return ""


def _traffic(entries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """From the ledger: how much each client sent, and which did not answer."""
    sent, silent = Counter[int](), dict[int, str]()
    for entry in entries:
        sent[entry["client"]] += sum(entry.get("up", {}).values())
        if entry["outcome"] != "answered":
            silent[entry["client"]] = entry.get("why", "")
    return {"sent": dict(+sent), "silent": silent}
