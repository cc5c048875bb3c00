"""What a user's images are, before anything is trained: `harmonium inspect PATH`.

A folder, a table or an archive is read once. What is counted is exact: images, sizes, modes,
broken files, near-duplicates, values of columns. What is measured (colours, ink, orientation,
detail) comes from a sample that is the same in every call. Rules over these numbers name the kind
of image and suggest settings. Nothing is written, and nothing leaves the machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from harmonium.core.errors import ConfigError, DataError, counted
from harmonium.data.cache import printable
from harmonium.data.decoding.dicom import is_dicom
from harmonium.data.images import GROUP
from harmonium.data.inspection import advice
from harmonium.data.inspection.advice import Clients, Suggestion, command
from harmonium.data.inspection.duplicates import Duplicates, near_duplicates
from harmonium.data.inspection.kinds import Kind, Removal, Verdict, kind_of, removals
from harmonium.data.inspection.listing import (
    LEVELS,
    Form,
    Listing,
    form_of,
    list_folder,
    list_table,
)
from harmonium.data.inspection.measures import Measures, measured
from harmonium.data.inspection.reading import Read, read_files, read_npz
from harmonium.data.inspection.structure import (
    Column,
    Structure,
    of_archive,
    of_folder,
    of_table,
)

__all__ = ["Inspection", "inspect"]

SHOWN = 8  # clients that a note names


@dataclass(frozen=True)
class Inspection:
    """What images are, what is wrong with them, and what to train with."""

    path: Path
    form: Form
    images: int  # that can be read
    parts: Mapping[str, int]  # of these, by part
    broken: Mapping[str, str]  # files that cannot be read, with the reason
    unread: str  # files that are not images by their ending
    sizes: Mapping[str, int]  # images by width x height, the commonest first
    modes: Mapping[str, int]  # images by mode
    depth: int | None  # bits that 16-bit grey uses; none: there is none
    duplicates: Duplicates
    columns: tuple[Column, ...]  # of a table or archive, or levels of folders
    label: str | None  # the column that names classes
    folders: str  # what subfolders look like
    clients: Clients
    kind: Kind
    evidence: tuple[str, ...]  # how the kind was found
    measures: Measures
    removals: tuple[Removal, ...]  # augmentations that would remove the signal
    suggestion: Suggestion
    problems: tuple[str, ...]  # what stops a run, to be mended first
    notes: tuple[str, ...]

    @property
    def command(self) -> str:
        """The command that trains on these images with the suggested settings."""
        return command(["harmonium", "run", "fedavg", *self.suggestion.words()])

    @property
    def start(self) -> str:
        """The command that chooses everything else as well."""
        data = [
            advice.word(key, value)
            for key, value in self.suggestion.settings.items()
            if key.startswith("data.") and key in self.suggestion.reasons
        ]
        return command(["harmonium", "start", str(self.path), *data])

    def plain(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            **asdict(self),
            "path": str(self.path),
            "command": self.command,
            "start": self.start,
        }


def inspect(path: str | Path, *words: str) -> Inspection:
    """Inspect a folder of images, a CSV table or an NPZ archive.

    Args:
        path: the folder or file.
        words: settings of `data` that say how it is to be read, such as
            `"data.client_column=hospital"` or `"data.root=/images"`.

    Returns:
        Counts, measurements and suggestions, frozen.

    >>> import tempfile, numpy as np
    >>> from PIL import Image
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for number in range(3):
    ...         pixels = np.full((9, 12), 80 * number + 40, np.uint8)
    ...         Image.fromarray(pixels).save(f"{folder}/{number}.png")
    ...     found = inspect(folder)
    >>> found.images, found.sizes, found.modes, found.duplicates.blank
    (3, {'12x9': 3}, {'grey': 3}, 3)
    """
    place = Path(path).expanduser().resolve()
    given = _given(words)
    form = form_of(place)
    if form == "npz":
        read = read_npz(place)
        found = _Found(form, place, None, read, of_archive(read.columns), given)
    else:
        texts = {key: str(value) for key, value in given.items()}
        listing = list_folder(place) if form == "folder" else list_table(place, texts)
        read = read_files(listing.images, given.get("depth"))
        if not len(read.places):
            raise DataError(f"{path}: none of {counted(len(listing.images), 'image')} can be read")
        found = _Found(form, place, listing, read, _structure(listing, read, texts), given)
    return found.inspection()


def _given(words: Sequence[str]) -> dict[str, Any]:
    """The settings of `data` among words; others have no meaning here."""
    given: dict[str, Any] = {}
    for one in words:
        key, equals, value = one.partition("=")
        if not equals or not key.startswith("data."):
            raise ConfigError(
                f"'{one}': only settings of data can be given, e.g. data.client_column=hospital"
            )
        given[key.removeprefix("data.")] = yaml.safe_load(value)
    return given


def _structure(listing: Listing, read: Read, given: Mapping[str, str]) -> Structure:
    """What columns or folders mean, by the images that can be read."""
    images = [listing.images[at] for at in read.places]
    columns = {name: [some[at] for at in read.places] for name, some in listing.columns.items()}
    listing = replace(listing, images=images, columns=columns)
    if listing.form == "csv":
        return of_table(listing)
    forms = list(zip(read.sizes, read.kinds, strict=True))
    return of_folder(replace(listing, settings={**listing.settings, **given}), forms)


@dataclass(frozen=True)
class _Found:
    """Everything that was read, from which an inspection is put together."""

    form: Form
    path: Path
    listing: Listing | None  # none of an archive
    read: Read
    structure: Structure
    given: Mapping[str, Any]

    def inspection(self) -> Inspection:
        read = self.read
        measures = measured(read.some, read.large)
        verdict = kind_of(measures)
        removed = removals(verdict.kind, measures)
        sizes, modes = Counter(read.sizes), Counter(read.kinds)
        parts = self._parts()
        counts = Counter(parts)
        settings, clients, problem, remark = self._with_groups(counts)
        names = self._names()
        suggestion = self._suggestion(settings, measures, verdict, removed, clients, counts)
        return Inspection(
            path=self.path,
            form=self.form,
            images=len(read.places),
            parts=dict(counts),
            broken={names[at]: why for at, why in read.broken},
            unread=self.listing.unread if self.listing else "",
            sizes={f"{width}x{height}": n for (width, height), n in sizes.most_common()},
            modes=dict(modes.most_common()),
            depth=read.depth,
            duplicates=near_duplicates(
                read.tiny, [names[at] for at in read.places], self._clients(), parts
            ),
            columns=self.structure.columns,
            label=self.structure.label,
            folders=self.structure.folders,
            clients=clients,
            kind=verdict.kind,
            evidence=verdict.evidence,
            measures=measures,
            removals=removed,
            suggestion=suggestion,
            problems=(problem,) if problem else (),
            notes=(
                *read.notes,
                *self.structure.notes,
                *advice.shape_notes(read.sizes, suggestion.size),
                *self._notes(clients),
                *remark,
            ),
        )

    def _with_groups(
        self, counts: Counter[str]
    ) -> tuple[dict[str, Any], Clients, str, tuple[str, ...]]:
        """Settings of `data`, the clients, a problem and a remark; groups together if possible."""
        group = self._group_settings()
        settings = {**self._data_settings(), **group}
        problem = advice.problem_with(settings)
        spec = None if problem else advice.spec_of(settings)
        asked = (self.structure, self._clients(), counts, spec)
        if not group:
            return settings, advice.clients_for(*asked), problem, ()
        name = self.structure.group
        try:
            self._check_groups()
            clients = advice.clients_for(*asked, self._groups())
        except DataError as error:  # or too large for the parts that are held out
            plain = self._data_settings()
            if group == {"data.group_column": GROUP}:  # which is kept together unless it is told
                plain["data.group_column"] = None
            spec = None if problem else advice.spec_of(plain)
            clients = advice.clients_for(self.structure, self._clients(), counts, spec)
            return plain, clients, problem, (f"'{name}' is not kept together: {error}",)
        remark = f"images with the same '{name}' are kept together in held-out parts and clients"
        return settings, clients, problem, (remark,)

    def _check_groups(self) -> None:
        """Raise an error for groups that reach over clients, which no split can keep together."""
        holders: dict[str, set[str]] = {}
        for group, client in zip(self._groups(), self._clients(), strict=True):
            if group and client:
                holders.setdefault(group, set()).add(client)
        if several := sum(len(some) > 1 for some in holders.values()):
            raise DataError(f"{counted(several, 'value')} of it occur at several clients")

    # ---- of each image that can be read ----

    def _names(self) -> list[str]:
        if self.listing is None:
            return [f"image {row}" for row in range(len(self.read.sizes))]
        return [printable(image.name) for image in self.listing.images]

    def _parts(self) -> list[str]:
        if self.listing is None:
            return self.read.parts
        return [self.listing.images[at].part for at in self.read.places]

    def _clients(self) -> list[str]:
        columns = self.read.columns if self.listing is None else self.listing.columns
        name = self.structure.client
        if name is None or name not in columns:
            return [""] * len(self.read.places)
        return [columns[name][at] for at in self.read.places]

    def _groups(self) -> list[str]:
        """What each image is kept together with; a folder's group is below its first level."""
        name = self.structure.group
        columns = self.read.columns if self.listing is None else self.listing.columns
        if name is None or name not in columns:
            return []
        values = [columns[name][at] for at in self.read.places]
        if self.form != "folder":
            return values
        above = [columns[LEVELS[0]][at] for at in self.read.places]
        return [f"{first}/{second}" for first, second in zip(above, values, strict=True)]

    # ---- what follows ----

    def _group_settings(self) -> dict[str, Any]:
        """The setting that keeps groups together; empty if there are none, or if it was given."""
        name = self.structure.group
        if name is None or {"group", "group_column"} & set(self.given):
            return {}
        if self.form == "folder":
            return {"data.group": "folder"}
        return {"data.group_column": name}

    def _data_settings(self) -> dict[str, Any]:
        """The settings of `data` with which a run reads these images."""
        settings: dict[str, Any] = {"data": self.form, "data.path": str(self.path)}
        own = self.listing.settings if self.listing is not None else {}
        named = {f"data.{key}": value for key, value in own.items() if key != "path"}
        found = {k: v for k, v in self.structure.settings.items() if k.startswith("data.")}
        settings |= {**named, **found}
        if self.read.broken:
            settings["data.corrupt"] = "skip"
        if self.read.depth is not None and self.read.depth != 16:
            settings["data.depth"] = self.read.depth
        return {**settings, **{f"data.{key}": value for key, value in self.given.items()}}

    def _suggestion(
        self,
        settings: Mapping[str, Any],
        measures: Measures,
        verdict: Verdict,
        removed: Sequence[Removal],
        clients: Clients,
        parts: Counter[str],
    ) -> Suggestion:
        size, why_size = advice.size_for(self.read.sizes, measures)
        channels, why_channels = advice.channels_for(measures)
        chosen = dict(settings)
        if set(self.read.sizes) != {(size, size)}:
            chosen.setdefault("data.size", size)
        if channels != self._native_channels():
            chosen.setdefault("data.channels", channels)
        if clients.by != "number":
            found = self.structure.settings
            chosen |= {key: found[key] for key in found if key.startswith("split")}
            if "" in self._clients():
                chosen["split.missing"] = "drop"
        chosen |= {"clients": clients.count, **advice.views_for(verdict.kind, removed)}
        if parts["train"] < advice.FEW:
            chosen["evaluate.k"] = 20
        reasons = {
            "size": why_size,
            "channels": why_channels,
            "views": f"the kind is {verdict.kind}",
            "clients": clients.why,
        }
        reasons |= {f"data.{key}": "as given" for key in self.given}
        return Suggestion(
            int(chosen.get("data.size", size)),
            int(chosen.get("data.channels", channels)),
            str(chosen["views"]),
            chosen,
            reasons,
        )

    def _native_channels(self) -> int:
        """The channels that a run gives images if `data.channels` is not set."""
        return 3 if self.listing is not None or "colour" in self.read.kinds else 1

    def _notes(self, clients: Clients) -> list[str]:
        notes = []
        if clients.sizes:
            small = [name for name, n in clients.sizes.items() if n < advice.SMALL_CLIENT]
            if small:
                some = ", ".join(small[:SHOWN])
                few = f"{len(small)} of {len(clients.sizes)} clients hold fewer than"
                notes.append(f"{few} {advice.SMALL_CLIENT} images: {some}")
            if (lost := len(clients.sizes) - clients.count) > 0:
                notes.append(
                    f"{counted(lost, 'client')} would lose all images to the validation and test "
                    "parts"
                )
            if missing := self._clients().count(""):
                notes.append(f"{counted(missing, 'image')} without a client would be left out")
        if self._may_share_patients():
            notes.append(
                "DICOM files may be of the same patients: data.group=patient keeps the images of "
                "one patient together in held-out parts and clients"
            )
        return notes

    def _may_share_patients(self) -> bool:
        """Whether there are DICOM files, and nothing says what is kept together."""
        if (
            self.listing is None
            or self.structure.group
            or {"group", "group_column"} & {*self.given}
        ):
            return False
        return any(is_dicom(self.listing.images[at].path) for at in self.read.places)
