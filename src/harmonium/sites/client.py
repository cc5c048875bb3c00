"""The client of a federation: it answers the server's requests with the images of its site."""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harmonium.core import devices
from harmonium.core import files as store
from harmonium.core.devices import AUTO, CPU
from harmonium.core.errors import (
    ConfigError,
    DataError,
    EngineError,
    HarmoniumError,
    PolicyRefusal,
    WireError,
    counted,
)
from harmonium.core.notes import Note
from harmonium.core.paths import make_folder
from harmonium.core.settings import choose
from harmonium.core.types import ClientId
from harmonium.data.datasets import DataSpec, datasets, read_alike
from harmonium.data.images import GROUP, UNKNOWN, Dataset, Images
from harmonium.engines.remote import NEEDS_FLOWER
from harmonium.engines.runtime import ClientRuntime, Labels
from harmonium.federation.method import Server
from harmonium.federation.spending import paid_here, records
from harmonium.privacy.budget import epsilon
from harmonium.recipe.overrides import apply_changes
from harmonium.recipe.schema import Recipe
from harmonium.runs.export import save_encoder
from harmonium.runs.open_run import load_public
from harmonium.sites import limits
from harmonium.sites.activity import FINISHED, ClientActivity
from harmonium.sites.certificates import expiries
from harmonium.sites.event_log import about_images, unreadable
from harmonium.sites.kit import Kit
from harmonium.sites.log import bytes_by_step
from harmonium.sites.metrics import BudgetReader, of_client, rendered, served, with_disk
from harmonium.sites.plan import classes_of, method_of
from harmonium.sites.policy import Policy
from harmonium.sites.server import is_loopback
from harmonium.sites.settings import SiteSettings
from harmonium.sites.site import Identity, Site
from harmonium.sites.upkeep import (
    RUNNING,
    owner_only,
    removable_at_site,
    remove,
    restrict_to_owner,
    single_instance,
)
from harmonium.storage.run_folder import SITE_REPORT

INSPECTION_SIDE = 8  # pixels to which images are resized for `inspect`
KEPT = "kept"  # folder in a kit: the log, and the site's files of each run


@dataclass(frozen=True)
class SiteImages:
    """The images that a site takes part with."""

    spec: DataSpec
    part: tuple[int, int] = (0, 1)  # first image and step; for trials on one machine

    @classmethod
    def parse(cls, text: str, changes: Sequence[str] = (), part: str = "") -> SiteImages:
        """Parse `name` or `name:path`, and `data.key=value` settings.

        All images of a folder or file are used for training; nothing is held out unless a
        setting says so. Unreadable files are skipped unless `data.corrupt=refuse`, so that a few
        of them do not keep a site out of a run.
        """
        check_place(text)
        name, _, path = text.partition(":")
        known = {field.name for field in fields(datasets[name])}
        has_path = "path" in known  # a published set keeps its test split: the server may use it
        tree: dict[str, Any] = {"name": name}
        if has_path:
            defaults = {"validation": 0.0, "test": 0.0, "corrupt": "skip"}
            tree |= {key: value for key, value in defaults.items() if key in known}
        if path:
            if not has_path:
                raise ConfigError(f"--data {text}: the data set {name} has no path")
            tree["path"] = str(Path(path).expanduser().absolute())
        for change in changes:
            if not change.startswith("data."):
                raise ConfigError(f"'{change}' is not a data setting: write data.key=value")
        spec = choose("data", datasets, apply_changes({"data": tree}, changes)["data"])
        if has_path and not getattr(spec, "path", ""):
            raise ConfigError(f"--data {text}: the path is missing, write --data {name}:PATH")
        spec.check()
        spec.identity()  # reads the folder or file, so that a mistake is reported at once
        return cls(spec, _parse_part(part))

    def inspect(self, note: Callable[[str], None]) -> tuple[int, int]:
        """Read all images once at a small size, and report their number and any problems.

        This reports unreadable files before the site connects. The images stay in the cache, so
        the next call is fast. Returns how many images there are, and how many cannot be read.
        """
        own = self.spec.channels
        dataset, images = self.load(INSPECTION_SIDE, 1 if own in (1, 3) else own)
        for text in dataset.notes:
            note(about_images(text))
        note(f"{counted(len(images), 'image')} to take part with")
        return len(images), sum(map(unreadable, dataset.notes))

    def for_plan(self, plan: DataSpec) -> DataSpec:
        """How this site reads its images for a plan, whose fit and grey levels go first."""
        return replace(read_alike(self.spec, plan), size=plan.size, channels=plan.channels)

    def load(self, size: int | None, channels: int | None) -> tuple[Dataset, Images]:
        """The data set at this size and number of channels, and the images to train on."""
        return self._loaded(replace(self.spec, size=size, channels=channels))

    def load_for(self, plan: DataSpec) -> tuple[Dataset, Images]:
        """The same as a plan has it."""
        return self._loaded(self.for_plan(plan))

    def _loaded(self, spec: DataSpec) -> tuple[Dataset, Images]:
        dataset = spec.load()
        return dataset, self.own(dataset.train)

    def own(self, images: Images) -> Images:
        """Those of a part's images that are this site's."""
        first, step = self.part
        return images.subset(np.arange(len(images))[first::step]) if step > 1 else images


def check_place(text: str) -> None:
    """Refuse a `--data` that names no data set, or a folder or file that does not exist.

    No image is read, so a message names none.
    """
    name, _, path = text.partition(":")
    if not path and name not in datasets.table() and "\0" not in name:
        kind = {".csv": "csv", ".npz": "npz"}.get(Path(name).suffix, "folder")
        if os.path.exists(Path(name).expanduser()):
            raise ConfigError(f"--data {text} is a path: write --data {kind}:{text}")
        if os.sep in name:
            raise ConfigError(
                f"--data {text}: there is no such file or folder, and a path is written --data "
                f"{kind}:PATH"
            )
    if path and "path" in {field.name for field in fields(datasets[name])}:
        if not os.path.exists(Path(path).expanduser()):
            raise DataError(f"--data {text}: there is no {path}, or it cannot be reached")
    else:
        _ = datasets[name]


def _parse_part(text: str) -> tuple[int, int]:
    if not text:
        return 0, 1
    first, _, step = text.partition("/")
    if not (first.isdigit() and step.isdigit() and 1 <= int(first) <= int(step)):
        raise ConfigError(f"--part {text}: write K/N with K from 1 to N, e.g. 1/3")
    return int(first) - 1, int(step)


def open_runtime(
    site_images: SiteImages,
    plan: Recipe,
    folder: Path,
    client: ClientId,
    key: bytes = b"",
    note: Callable[[str], None] = lambda text: None,
    device: torch.device = CPU,
) -> ClientRuntime:
    """The runtime that performs a plan's tasks, for the one client that this site is."""
    method = method_of(plan)
    dataset, images = site_images.load_for(plan.data)
    for text in dataset.notes:
        note(about_images(text))
    labels = None
    if method.site_evaluation is not None:
        labels = _labels_to_evaluate(site_images, dataset, images, plan, note)
    if method.reads_labels:
        images = images.relabelled(_labels_by_plan(images, dataset, classes_of(plan)))
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
        device=device,
        labels=labels,
        key=key,
    )


def _labels_to_evaluate(
    site_images: SiteImages,
    dataset: Dataset,
    images: Images,
    plan: Recipe,
    note: Callable[[str], None],
) -> Labels | None:
    """The site's labels by the plan's classes, for exchanges that evaluate; none if it has none.

    Images of other classes count as unlabelled. The site's own test part, if it has one, is for
    testing only.
    """
    classes, test = plan.evaluate.sites_classes, site_images.own(dataset.test)
    others = [name for name in dataset.classes if name not in classes]
    if others:
        note(f"images of {', '.join(others)} do not count: the plan has {', '.join(classes)}")
    numbers = [classes.index(one) if one in classes else UNKNOWN for one in dataset.classes]
    by_plan = np.array([*numbers, UNKNOWN])  # a label of -1 (unknown) takes the last number
    known, known_test = by_plan[images.labels], by_plan[test.labels]
    if not (known != UNKNOWN).any():
        return None
    tested = test.relabelled(known_test) if (known_test != UNKNOWN).any() else None
    return Labels(known, images.factors.get(GROUP), tested)


def _labels_by_plan(images: Images, dataset: Dataset, classes: Sequence[str]) -> np.ndarray:
    """Labels numbered as in the plan, which is the same at every site."""
    if unknown := sorted(set(dataset.classes) - set(classes)):
        raise DataError(f"the plan has no class '{unknown[0]}': it has {', '.join(classes)}")
    numbers = np.array([*(classes.index(name) for name in dataset.classes), UNKNOWN])
    return numbers[images.labels]  # a label of -1 (unknown) takes the last number


def describe_budget(
    policy: Policy, plan: Recipe, past: Sequence[Mapping[str, Any]], images: int | None
) -> str:
    """A sentence on what a plan would add to the spent privacy budget; empty: nothing.

    Each exchange is counted once a round, which is the most that a plan asks for. A plan is refused
    if the budget does not allow even one round.

    Args:
        policy: the site's, with its `epsilon` and `delta`.
        plan: the recipe to count.
        past: guarded releases in the site's log.
        images: number of images at the site; none: unknown.
    """
    method, delta = method_of(plan), policy.delta

    def after(rounds: int) -> float:
        releases = [r for step in method.exchanges() for r in paid_here(method, step, images or 1)]
        planned = [{**r, "count": r.get("count", 1) * rounds} for r in records(releases)]
        return epsilon([*past, *(planned if rounds else [])], delta, neighbours="replace")

    guarded = any(part.guarded for one in method.exchanges().values() for part in one.up.values())
    if not guarded and after(1) == after(0):
        return ""
    spent = f"epsilon {after(0):.4g} at delta {delta:g} is spent"
    if images is None:
        return f"{spent}; give --images N to count what the plan would add"
    limit = math.inf if policy.epsilon is None else policy.epsilon
    rounds = bisect_right(range(1, plan.rounds + 1), limit, key=after)
    if rounds == 0:
        raise PolicyRefusal(
            f"the site's budget does not allow this plan: {spent}, one round would make it "
            f"{after(1):.4g}, and `epsilon` is {limit:g} over all releases of this site"
        )
    if rounds < plan.rounds:
        return f"{spent}; `epsilon` {limit:g} allows at least {rounds} of {plan.rounds} rounds"
    bound = "" if math.isinf(limit) else f", within {limit:g}"
    return f"{spent}; after {plan.rounds} rounds it is at most {after(plan.rounds):.4g}{bound}"


def save_final_encoder(
    plan: Recipe,
    runtime: ClientRuntime,
    folder: Path,
    message: Mapping[str, Any],
    state: Mapping[str, Any],
    left: Mapping[str, Mapping[str, int]],
    reading: DataSpec | None = None,
) -> Path:
    """Write the final encoder and `run.json` into the run's folder at this site.

    `run.json` has the results and metrics of the run from the server, the participants, and the
    bytes that left this site.

    Args:
        plan: the run's recipe.
        runtime: the runtime of this site's client.
        folder: the run's folder at this site.
        message: the values that the server sent with `finish`.
        state: the client's kept state, for methods with personal parts.
        left: bytes that left this site, by exchange and kind.
        reading: how this site read its images, if not as the plan's data.
    """
    server = Server({}, message["model"], memory={"statistics": message["statistics"]})
    path = folder / "encoder.safetensors"
    encoder = runtime.method.represent(server, state)
    files = {
        path.name: save_encoder(
            *(path, encoder, plan, runtime.method, plan.data.name, runtime.images.shape),
            reading=reading,
        ),
        "recipe.yaml": store.write_atomic(folder / "recipe.yaml", plan.yaml().encode()),
    }
    try:
        results = json.loads(message.get("told", "{}"))
    except (ValueError, TypeError, RecursionError):  # the encoder matters more
        results = None
    about = {**(results if isinstance(results, dict) else {}), "left": left, "files": files}
    store.write_atomic(folder / SITE_REPORT, store.sealed(about), private=True)
    return path


def site_device(name: str) -> torch.device:
    """The device of `--device`; one that is not here is refused."""
    try:
        return devices.resolve(name)[0]
    except ConfigError as error:  # about the setting of a recipe
        text = str(error).replace("engine.device=", "--device ")
        raise ConfigError(text.replace("engine.device", "--device")) from None


def run_client(
    kit: Kit,
    site_images: SiteImages,
    note: Callable[[str], None],
    *,
    address: str | None = None,
    insecure: bool = False,
    once: bool = False,
    keep_days: float | None = None,
    device: str = AUTO,
    ended: threading.Event | None = None,
) -> None:
    """Answer the server until `ended` is set; with `once`, until a run has finished.

    All images are read once, before the client connects.

    Args:
        kit: the site's identity and the keys that it trusts.
        site_images: the images that it takes part with.
        note: called with each message for the user.
        address: of the server, `host:port`; none: the kit's.
        insecure: connect without TLS; to loopback only.
        once: stop when the server reports that a run has finished.
        keep_days: days after which answers and states of earlier runs are deleted; none: never.
        device: where this site computes, whatever the plan says: auto, cpu, cuda, cuda:1 or mps.
        ended: an event that stops the client when it is set.
    """
    settings, place = SiteSettings.read(kit.folder, limited=True), site_device(device)
    devices.select(place)
    if place.type != "cpu":
        note(f"computing on {devices.device_name(place)}")
    try:
        from harmonium.engines.flower.node import answer_messages
    except ImportError:
        raise ConfigError(NEEDS_FLOWER) from None
    Policy.read(kit.policy)  # report mistakes at once; each request reads the file again
    address = address or f"{_bracketed(kit.hosts[0])}:{kit.port}"
    if insecure and not is_loopback(address.rpartition(":")[0]):
        raise ConfigError(f"--insecure connects to loopback only, not to {address}")
    limits.apply(settings.limits)
    data = {"name": site_images.spec.name, "path": str(getattr(site_images.spec, "path", ""))}
    reporter = ClientActivity(kit.folder / KEPT, address, data, str(place))
    reporter.images(*site_images.inspect(note))
    over = ended or threading.Event()

    def finished() -> None:
        if once:
            reporter.finished(FINISHED)
            threading.Timer(1.0, over.set).start()  # the reply must still be sent

    site = _site(kit, site_images, note, place, finished)
    site.limits, site.record = settings.limits, reporter.answered
    with (
        owner_only(),
        single_instance(make_folder(site.folder), RUNNING, f"client with the kit {kit.folder}"),
    ):
        restrict_to_owner(kit.folder)
        site.log.verify()
        if keep_days is not None:
            remove(removable_at_site(site.folder, keep_days))
        connection = (address, kit.private_key, None if insecure else kit.authority)
        with (
            served(settings.metrics, _metrics(kit, site, reporter)),
            reporter.activity.running(),
        ):
            answer_messages(_discreet(site), *connection, note, over, contact=reporter.contact)


def _site(
    kit: Kit,
    site_images: SiteImages,
    note: Callable[[str], None],
    place: torch.device,
    finished: Callable[[], None],
) -> Site:
    """The site that answers; `finished` is called when it has the final encoder of a run."""
    number = kit.private_key.private_numbers().private_value.to_bytes(48, "big")
    secret = hashlib.blake2b(number, person=b"harmonium states").digest()

    def finish(
        plan: Recipe, runtime: ClientRuntime, folder: Path, message: Any, state: Any
    ) -> None:
        left = bytes_by_step(site.log.entries(), folder.name)
        reading = site_images.for_plan(plan.data)
        path = save_final_encoder(plan, runtime, folder, message, state, left, reading)
        note(f"the run is over: the encoder is {path}")
        note(f"{path.with_name(SITE_REPORT)} has the results, the participants and the bytes sent")
        note(f"evaluate it on a labelled set: harmonium eval {folder} knn on=SET")
        finished()

    site = Site(
        Identity(kit.federation, kit.number, kit.private_key, kit.server_key),
        kit.folder / KEPT,
        lambda plan, folder, client: open_runtime(
            site_images, plan, folder, client, secret, note, place
        ),
        kit.policy,
        finish,
        note,
    )
    return site


def _discreet(site: Site) -> Callable[[bytes, list[bytes]], tuple[bytes, list[bytes]]]:
    """The site's answer, without errors that name its files: the server must not see them."""

    def answer(sealed: bytes, bodies: list[bytes]) -> tuple[bytes, list[bytes]]:
        try:
            return site.answer(sealed, bodies)
        except WireError:  # about the ask
            raise
        except HarmoniumError as error:
            kind = type(error).__name__
            site.note(Note(f"no answer: {error}", "error", f"no answer: {kind}"))
            raise EngineError(f"{kind} at the site: its log has the details") from None

    return answer


def _metrics(kit: Kit, site: Site, reporter: ClientActivity) -> Callable[[], str]:
    """A function that returns the client's metrics."""
    budget, ends = BudgetReader(site.log.path, kit.policy), {"authority": kit.authority}

    def text() -> str:
        facts = reporter.activity.snapshot() | {"budget": budget.read()}
        facts |= {"certificates": expiries(ends)}
        return rendered(of_client(with_disk(facts, site.folder)))

    return text


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
