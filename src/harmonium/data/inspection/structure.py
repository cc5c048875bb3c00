"""What the columns of a table and the levels of a folder mean: labels, clients, groups.

Nothing says so but names and counts, so every decision comes with its reason, and the command that
`harmonium inspect` ends with shows it as settings that can be changed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from harmonium.data.inspection.listing import LEVELS, Listing

Role = Literal["label", "client", "domain", "group", "number", "unknown"]

# Words by which a column is known; the first that a table has is taken. A name such as `site_id`
# counts as well, because its first word is one of these.
WORDS: dict[Role, tuple[str, ...]] = {
    "label": (
        *(
            "label",
            "labels",
            "class",
            "target",
            "y",
            "diagnosis",
            "category",
            "finding",
            "findings",
        ),
        *("grade", "species", "disease", "outcome", "condition", "type", "truth"),
    ),
    "client": (
        *("client", "clients", "site", "hospital", "clinic", "centre", "center", "institution"),
        *("institute", "device", "scanner", "user", "station", "node", "silo", "party"),
    ),
    "domain": ("domain", "domains", "style", "camera", "vendor", "source", "stain", "modality"),
    "group": (
        *("patient", "subject", "case", "participant", "person", "study", "series", "slide"),
        *("group", "family", "animal", "accession"),
    ),
}
_SITES = (
    *WORDS["client"],
    *("camera", "vendor", "lab", "laboratory", "branch", "office", "ward", "region", "city"),
    *("plant", "store", "shop", "farm", "unit", "factory", "source", "domain", "bureau"),
)
_COMPASS = {"north", "south", "east", "west", "central", "northeast", "northwest"}
_COMPASS |= {"southeast", "southwest", "middle", "centre", "center"}
CLASSES = 1000  # a column with more values is no label
NAMED = 0.5  # share of folders whose names must sound like sites
OWN = 0.9  # share of a folder's images that must have its form, where it has one of its own

Form = tuple[tuple[int, int], str]
"""Size and mode of an image."""


@dataclass(frozen=True)
class Column:
    """A column of a table, an array of an archive, or a level of folders."""

    name: str
    role: Role
    values: int  # distinct ones
    known: int  # images with a value
    least: int  # images of the rarest value
    most: int  # images of the commonest
    examples: tuple[str, ...]  # a few values of labels and clients; others may identify patients
    why: str = ""  # how its role was found


@dataclass(frozen=True)
class Structure:
    """Who holds what, and which class an image is of, as far as columns and folders say."""

    columns: tuple[Column, ...]
    label: str | None = None  # the column of labels
    client: str | None = None  # the column of clients
    group: str | None = None  # the column of what belongs together, such as a patient
    folders: str = ""  # what subfolders look like, in words
    settings: Mapping[str, Any] = field(default_factory=dict)  # of `data` and `split`
    notes: tuple[str, ...] = ()

    def column(self, name: str | None) -> Column | None:
        """The column of this name, if there is one."""
        return next((one for one in self.columns if one.name == name), None)


def word_of(name: str) -> str:
    """The first word of a name, in lower case and without digits at its end.

    >>> [word_of(name) for name in ("Site_ID", "hospital-3", "scannerB", "site12")]
    ['site', 'hospital', 'scanner', 'site']
    """
    parts = re.split(r"[\s_.\-]+|(?<=[a-z])(?=[A-Z0-9])", name.strip())
    return parts[0].lower() if parts else ""


# ---- columns -------------------------------------------------------------------------------------


def of_table(listing: Listing) -> Structure:
    """What the columns of a table mean; settings that name columns decide."""
    given = listing.settings
    columns = [_column(name, values) for name, values in listing.columns.items()]
    chosen: dict[str, str] = {}
    for role in ("label", "client", "domain"):
        if name := given.get(f"{role}_column") or _best(columns, role):
            chosen[role] = name
    settings = {f"data.{role}_column": name for role, name in chosen.items() if name != role}
    client = chosen.get("client") or chosen.get("domain")
    if client is not None:
        settings["split"] = "column"
    if client is not None and "client" not in chosen:
        settings["split.column"] = "style"
    columns = [_as(one, _role_in(chosen, one.name)) for one in columns]
    return Structure(
        tuple(columns),
        label=chosen.get("label"),
        client=client,
        group=_best(columns, "group"),
        settings=settings,
    )


def of_archive(columns: Mapping[str, Sequence[str]]) -> Structure:
    """What the arrays of an archive mean beside its images; its labels are known by their name."""
    found = [_column(name, values) for name, values in columns.items()]
    client = _best(found, "client") or _best(found, "domain")
    settings = {"split": "column", "split.column": client} if client else {}
    if client == "client":
        del settings["split.column"]
    label = "label" if "label" in columns else None
    used = (label, client)
    return Structure(
        tuple(one if one.name in used else replace(one, examples=()) for one in found),
        label=label,
        client=client,
        group=_best(found, "group"),
        settings=settings,
    )


def _role_in(chosen: Mapping[str, str], name: str) -> Role | None:
    roles: tuple[Role, ...] = ("label", "client", "domain")
    return next((role for role in roles if chosen.get(role) == name), None)


def _as(column: Column, role: Role | None) -> Column:
    """A column in the role that it was given; without one its values are not shown."""
    if role is None:
        return replace(column, examples=())
    why = column.why if column.role == role else f"given as the {role}"
    return replace(column, role=role, why=why)


def _column(name: str, values: Sequence[str]) -> Column:
    counts = Counter(value for value in values if value)
    role, why = _role(name, counts)
    return Column(
        name,
        role,
        len(counts),
        counts.total(),
        min(counts.values(), default=0),
        max(counts.values(), default=0),
        tuple(sorted(counts, key=lambda value: (-counts[value], value))[:5]),
        why,
    )


def _role(name: str, counts: Counter[str]) -> tuple[Role, str]:
    """The role of a column by its name, if its values allow it."""
    word = word_of(name)
    for role, words in WORDS.items():
        if word in words:
            if role == "label" and len(counts) > CLASSES:
                return "unknown", f"{len(counts):,} values are too many for classes"
            return role, f"named '{name}'"
    if counts and all(_is_number(value) for value in counts) and len(counts) > 20:
        return "number", ""
    return "unknown", ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _best(columns: Sequence[Column], role: Role) -> str | None:
    """The column of a role: the one whose word comes first, and then the first of the table."""
    some = [one for one in columns if one.role == role and one.values >= 1]
    order = WORDS[role]
    return min(some, key=lambda one: order.index(word_of(one.name))).name if some else None


# ---- folders -------------------------------------------------------------------------------------


def of_folder(listing: Listing, forms: Sequence[Form]) -> Structure:
    """What the subfolders of a folder look like: classes, sites, or sites and then classes.

    Args:
        listing: the folder's images.
        forms: size and mode of each image.
    """
    first, second = (listing.columns[level] for level in LEVELS)
    columns = [_column(level, listing.columns[level]) for level in LEVELS]
    if not any(first):
        return Structure((), folders="none: images lie directly in the folder")
    names = sorted({name for name in first if name})
    is_site, why = _sites(names, first, forms)
    nested = any(second)
    shared = nested and _are_shared(first, second)
    if "styles" in listing.settings:
        is_site, why = listing.settings["styles"] == "True", "given by data.styles"
    if is_site:
        label = LEVELS[1] if shared else None
        folders = "sites, then classes" if shared else "sites, then groups" if nested else "sites"
        settings: dict[str, Any] = {"data.styles": True, "split": "column"}
        settings["split.column"] = "style"
        roles: list[Role] = ["client", "label" if shared else "group"]
    else:
        label = LEVELS[0]
        folders = "classes, then groups" if nested else "classes"
        settings, roles = {}, ["label", "group"]
    used = columns if nested else columns[:1]
    cast = zip(used, roles, (why, _why_second(shared)), strict=False)
    said = [_cast(one, role, reason) for one, role, reason in cast]
    return Structure(
        tuple(said),
        label=label,
        client=LEVELS[0] if is_site else None,
        group=LEVELS[1] if nested and label != LEVELS[1] else None,
        folders=f"{folders} ({why})",
        settings=settings,
        notes=_folder_notes(is_site=is_site, nested=nested, shared=shared),
    )


def _cast(column: Column, role: Role, why: str) -> Column:
    """A column in a role; values of groups may identify patients, and are not shown."""
    return replace(column, role=role, why=why, examples=() if role == "group" else column.examples)


def _why_second(shared: bool) -> str:
    return "the same names recur in several folders" if shared else "each name is in one folder"


def _folder_notes(*, is_site: bool, nested: bool, shared: bool) -> tuple[str, ...]:
    if is_site and nested and not shared:
        return ("folders below a site are read as classes, though no two sites share one",)
    if not is_site and nested and shared:
        return (
            "subfolders recur in several folders, as classes do inside sites: if the first level "
            "is sites, say data.styles=true",
        )
    if not is_site:
        return ("if the folders are sites and not classes, say data.styles=true",)
    return ()


def _sites(names: Sequence[str], first: Sequence[str], forms: Sequence[Form]) -> tuple[bool, str]:
    """Whether folders are sites, by their names or else by the form of their images; and why."""
    sounding = [name for name in names if word_of(name) in _SITES or name.lower() in _COMPASS]
    if len(names) > 1 and len(sounding) >= NAMED * len(names):
        return True, f"{len(sounding)} of {len(names)} names are those of places or devices"
    if len(names) > 1 and (share := _own_form(first, forms)) is not None:
        return True, f"each folder has a size or mode of its own ({share:.0%} of its images)"
    return (
        False,
        "no name is that of a place or device, and sizes and modes do not differ by folder",
    )


def _own_form(first: Sequence[str], forms: Sequence[Form]) -> float | None:
    """The share of images that have the form of their folder, if most folders have one alone."""
    by_folder: dict[str, Counter[Form]] = {}
    for name, form in zip(first, forms, strict=True):
        if name:
            by_folder.setdefault(name, Counter())[form] += 1
    usual = {name: forms_.most_common(1)[0] for name, forms_ in by_folder.items()}
    if len(usual) < 2 or len({form for form, _ in usual.values()}) <= len(usual) / 2:
        return None
    share = sum(n for _, n in usual.values()) / sum(c.total() for c in by_folder.values())
    return share if share >= OWN and len({form for form, _ in usual.values()}) > 1 else None


def _are_shared(first: Sequence[str], second: Sequence[str]) -> bool:
    """Whether most names of the second level are found below several folders of the first."""
    above: dict[str, set[str]] = {}
    for one, other in zip(first, second, strict=True):
        if other:
            above.setdefault(other, set()).add(one)
    return sum(len(folders) > 1 for folders in above.values()) > len(above) / 2
