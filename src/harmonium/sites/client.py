"""The client of a federation: at a site, it answers the server with the images that are there."""

from __future__ import annotations

import hashlib
import json
import math
import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from harmonium.core import files as store
from harmonium.core.errors import ConfigError, DataError, PolicyRefusal, counted
from harmonium.core.paths import make_folder
from harmonium.core.settings import choose
from harmonium.core.types import ClientId
from harmonium.data.datasets import DataSpec, datasets
from harmonium.data.images import UNKNOWN, Dataset, Images
from harmonium.engines.remote import NEEDS_FLOWER
from harmonium.engines.runtime import ClientRuntime
from harmonium.federation.method import Server
from harmonium.federation.spending import paid_here, records
from harmonium.privacy.budget import epsilon
from harmonium.recipe.overrides import apply_changes
from harmonium.recipe.schema import Recipe
from harmonium.runs.export import save_encoder
from harmonium.runs.open_run import load_public
from harmonium.sites.kit import Kit
from harmonium.sites.log import left_by_step
from harmonium.sites.plan import classes_of, method_of
from harmonium.sites.policy import Policy
from harmonium.sites.server import is_loopback
from harmonium.sites.site import Identity, Site
from harmonium.sites.upkeep import RUNNING, alone, at_site, close_to_others, private, remove
from harmonium.storage.run_folder import TOLD

LOOK = 8  # side to which images are brought when they are looked at
KEPT = "kept"  # beside a kit: the log, and what the site keeps of each run


@dataclass(frozen=True)
class SiteImages:
    """What a site takes part with."""

    spec: DataSpec
    part: tuple[int, int] = (0, 1)  # for trials on one machine: every n-th image from the k-th on

    @classmethod
    def of(cls, words: str, changes: Sequence[str] = (), part: str = "") -> SiteImages:
        """From `name`, or `name:path`, and `data.key=value` settings.

        All images of one's own are used; nothing is held out unless a setting says so. Files
        that cannot be read are left out unless `data.corrupt=refuse`, for a few of them must not
        cost a site the run.
        """
        name, _, path = words.partition(":")
        chosen = datasets[name]
        known = {field.name for field in fields(chosen)}
        own = "path" in known  # of a published set the server may judge with what is held out
        tree: dict[str, Any] = {"name": name}
        if own:
            usual = {"validation": 0.0, "test": 0.0, "corrupt": "skip"}
            tree |= {key: value for key, value in usual.items() if key in known}
        if path:
            if not own:
                raise ConfigError(f"--data {words}: the data set {name} has no path")
            tree["path"] = str(Path(path).expanduser().absolute())
        for change in changes:
            if not change.startswith("data."):
                raise ConfigError(f"'{change}' is no setting of the data: write data.key=value")
        spec = choose("data", datasets, apply_changes({"data": tree}, changes)["data"])
        if own and not getattr(spec, "path", ""):
            raise ConfigError(f"--data {words}: say where the images are, --data {name}:PATH")
        spec.check()
        spec.identity()  # looks at what is there, so that a mistake is told at once
        return cls(spec, _part(part))

    def look(self, note: Callable[[str], None]) -> None:
        """Read all of them once, small, and say what there is and what is wrong with it.

        So a site learns of files that cannot be read before it connects. What was read stays in
        the cache, and the next look is quick.
        """
        dataset, images = self.load(LOOK, 1)
        for text in dataset.notes:
            note(text)
        note(f"{counted(len(images), 'image')} to take part with")

    def load(self, size: int | None, channels: int | None) -> tuple[Dataset, Images]:
        """The images, brought to a shape."""
        dataset = replace(self.spec, size=size, channels=channels).load()
        first, step = self.part
        chosen = dataset.train
        return dataset, chosen.subset(np.arange(len(chosen))[first::step]) if step > 1 else chosen


def _part(words: str) -> tuple[int, int]:
    if not words:
        return 0, 1
    first, _, step = words.partition("/")
    if not (first.isdigit() and step.isdigit() and 1 <= int(first) <= int(step)):
        raise ConfigError(f"--part {words}: write K/N with K from 1 to N, e.g. 1/3")
    return int(first) - 1, int(step)


def open_host(
    pictures: SiteImages,
    plan: Recipe,
    folder: Path,
    client: ClientId,
    key: bytes = b"",
    note: Callable[[str], None] = lambda text: None,
) -> ClientRuntime:
    """What performs a plan's tasks here, for the one client that this site is."""
    method = method_of(plan)
    dataset, images = pictures.load(plan.data.size, plan.data.channels)
    for text in dataset.notes:
        note(text)
    if method.reads_labels:
        images = images.relabelled(_numbered(images, dataset, classes_of(plan)))
    else:
        images = images.without_labels()
    public = load_public(plan, images.shape)
    return ClientRuntime(
        method=method,
        images=images,
        indices={client: np.arange(len(images))},
        folder=folder / "clients",
        noise=plan.privacy.noise,
        public=public.train.without_labels() if public else None,
        masks=plan.privacy.masks,
        key=key,
    )


def _numbered(images: Images, dataset: Dataset, classes: Sequence[str]) -> np.ndarray:
    """Labels by the plan's numbers, which are the same at every site."""
    if strange := sorted(set(dataset.classes) - set(classes)):
        raise DataError(f"the plan knows no class '{strange[0]}': it has {', '.join(classes)}")
    places = np.array([*(classes.index(name) for name in dataset.classes), UNKNOWN])
    return places[images.labels]  # the last is what -1 stands for


def budget_words(
    policy: Policy, plan: Recipe, past: Sequence[Mapping[str, Any]], images: int | None
) -> str:
    """What a plan would add to the guarded releases of this site, `past`; empty: nothing.

    Each exchange is counted once a round, which is the most that a plan asks for. Refuses a plan
    of which not even one round is left.
    """
    method, delta = method_of(plan), policy.delta

    def after(rounds: int) -> float:
        made = [one for step in method.exchanges() for one in paid_here(method, step, images or 1)]
        planned = [{**one, "count": one.get("count", 1) * rounds} for one in records(made)]
        return epsilon([*past, *(planned if rounds else [])], delta, neighbours="replace")

    guarded = any(part.guarded for one in method.exchanges().values() for part in one.up.values())
    if not guarded and after(1) == after(0):
        return ""
    spent = f"epsilon {after(0):.4g} at delta {delta:g} is spent"
    if images is None:
        return f"{spent}; name --images N to count what the plan would add"
    limit = math.inf if policy.epsilon is None else policy.epsilon
    rounds = bisect_right(range(1, plan.rounds + 1), limit, key=after)
    if rounds == 0:
        raise PolicyRefusal(
            f"the site's budget does not allow this plan: {spent}, {after(1):.4g} would be after "
            f"one round, and `epsilon` is {limit:g} over all releases of this site"
        )
    if rounds < plan.rounds:
        return f"{spent}; `epsilon` {limit:g} allows at least {rounds} of {plan.rounds} rounds"
    bound = "" if math.isinf(limit) else f", within {limit:g}"
    return f"{spent}; after {plan.rounds} rounds it is at most {after(plan.rounds):.4g}{bound}"


def take_home(
    plan: Recipe,
    host: ClientRuntime,
    folder: Path,
    told: Mapping[str, Any],
    kept: Mapping[str, Any],
    left: Mapping[str, Mapping[str, int]],
) -> Path:
    """Write the final encoder, with what this site kept of its own, where the site finds it.

    Beside it, `run.json` has the run's figures and metrics as the server has them, who took part,
    and what `left` this site: bytes by exchange and kind.
    """
    server = Server({}, told["model"], memory={"statistics": told["statistics"]})
    path = folder / "encoder.safetensors"
    encoder = host.method.represent(server, kept)
    files = {
        path.name: save_encoder(
            path, encoder, plan, host.method, plan.data.name, host.images.shape
        ),
        "recipe.yaml": store.write_atomic(folder / "recipe.yaml", plan.yaml().encode()),
    }
    try:
        said = json.loads(told.get("told", "{}"))
    except (ValueError, TypeError, RecursionError):  # the encoder is what counts
        said = None
    about = {**(said if isinstance(said, dict) else {}), "left": left, "files": files}
    store.write_atomic(folder / TOLD, store.sealed(about), private=True)
    return path


def attend(
    kit: Kit,
    pictures: SiteImages,
    note: Callable[[str], None],
    *,
    address: str | None = None,
    insecure: bool = False,
    once: bool = False,
    keep_days: float | None = None,
    ended: threading.Event | None = None,
) -> None:
    """Answer the server until told to end; with `once`, until a run is over.

    Args:
        kit: who this site is, and whom it trusts.
        pictures: what it takes part with.
        note: told what a reader should know.
        address: of the server, `host:port`; none: the kit's.
        insecure: no TLS; to loopback only.
        once: leave when the server says that a run is over.
        keep_days: how long answers and states of earlier runs stay; none: for ever.
        ended: set to end.
    """
    try:
        from harmonium.engines.flower.node import attend as attend_node
    except ImportError:
        raise ConfigError(NEEDS_FLOWER) from None
    Policy.read(kit.policy)  # a mistake is told at once; then it is read at every ask
    address = address or f"{_bracketed(kit.hosts[0])}:{kit.port}"
    if insecure and not is_loopback(address.rpartition(":")[0]):
        raise ConfigError(f"--insecure speaks to loopback only, not to {address}")
    over = ended or threading.Event()
    number = kit.private_key.private_numbers().private_value.to_bytes(48, "big")
    secret = hashlib.blake2b(number, person=b"harmonium states").digest()

    def finish(plan: Recipe, host: ClientRuntime, folder: Path, told: Any, kept: Any) -> None:
        left = left_by_step(site.log.entries(), folder.name)
        path = take_home(plan, host, folder, told, kept, left)
        note(f"the run is over: the encoder is {path}")
        note(f"{path.with_name(TOLD)} has its figures, who took part, and what left this site")
        note(f"judge it on images of your own: harmonium eval {folder} knn on=SET")
        if once:
            threading.Timer(1.0, over.set).start()  # the answer to this must still leave

    site = Site(
        Identity(kit.federation, kit.number, kit.private_key, kit.server_key),
        kit.folder / KEPT,
        lambda plan, folder, client: open_host(pictures, plan, folder, client, secret, note),
        kit.policy,
        finish,
        note,
    )
    with private(), alone(make_folder(site.folder), RUNNING, f"client with the kit {kit.folder}"):
        close_to_others(kit.folder)
        site.log.verify()
        if keep_days is not None:
            remove(at_site(site.folder, keep_days))
        certificate = None if insecure else kit.authority
        attend_node(site.answer, address, kit.private_key, certificate, note, over)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
