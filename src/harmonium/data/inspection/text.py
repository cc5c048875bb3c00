"""An inspection in words, as people read it: a heading and a sentence for each line."""

from __future__ import annotations

from harmonium.core.errors import counted
from harmonium.data.inspection import Inspection
from harmonium.data.inspection.duplicates import Duplicates
from harmonium.data.inspection.kinds import CALLED
from harmonium.data.inspection.reading import WIDE

NAMED = 20  # broken files that are named; JSON has all of them
SHOWN = 8  # clients and modes that are named

FORMS = {"folder": "a folder", "csv": "a table", "npz": "an archive of arrays"}


def lines(one: Inspection) -> list[tuple[str, str]]:
    """Everything that was found, ending with the commands to run."""
    return [*_counted_lines(one), *_structure_lines(one), *_advice_lines(one)]


def _counted_lines(one: Inspection) -> list[tuple[str, str]]:
    parts = ", ".join(f"{part} {count:,}" for part, count in one.parts.items())
    parts = f" ({parts})" if len(one.parts) > 1 else ""
    lines = [("images", f"{one.images:,} in {FORMS[one.form]}{parts}")]
    sizes = list(one.sizes.items())
    size, count = sizes[0]
    some = f"{size}" if len(sizes) == 1 else f"{len(sizes):,}, mostly {size} ({count:,} images)"
    lines.append(("sizes", some))
    modes = [f"{count:,} {mode}" for mode, count in one.modes.items()]
    lines.append(("modes", ", ".join(modes[:SHOWN])))
    if one.depth is not None:
        wide = one.modes.get(WIDE, 0)
        lines.append(
            ("bits", f"{counted(wide, 'image')} of 16 bits, of which {one.depth} are used")
        )
    if one.broken:
        named = ", ".join(f"{name} ({why})" for name, why in list(one.broken.items())[:NAMED])
        more = f" and {len(one.broken) - NAMED} more" if len(one.broken) > NAMED else ""
        lines.append(("broken", f"{len(one.broken):,} cannot be read: {named}{more}"))
    if one.unread:
        lines.append(("unread", f"not images by their ending: {one.unread}"))
    return [*lines, *_duplicate_lines(one.duplicates)]


def _duplicate_lines(found: Duplicates) -> list[tuple[str, str]]:
    lines = []
    if found.blank:
        lines.append(("blank", f"{counted(found.blank, 'image')} of one colour"))
    if not found.groups:
        return [*lines, ("alike", "no near-duplicates")]
    text = f"{found.images:,} images in {counted(found.groups, 'group')} of near-duplicates"
    if found.across:
        text += f", {found.across:,} of them across clients"
    if found.parts:
        text += f", {found.parts:,} across train, validation and test"
    return [*lines, ("alike", f"{text}, such as {' = '.join(found.examples[0])}")]


def _structure_lines(one: Inspection) -> list[tuple[str, str]]:
    lines = [("folders", one.folders)] if one.folders else []
    for column in one.columns:
        least, most = f"{column.least:,}", f"{column.most:,}"
        counts = f"{least if least == most else f'{least} to {most}'} images each"
        some = ", ".join(column.examples[:4])
        some += ", …" if column.examples and column.values > 4 else ""
        use = "not used" if column.role in ("unknown", "number") else column.role
        why = f", {column.why}" if column.why and not one.folders else ""
        values = f"{counted(column.values, 'value')}{some and f' ({some})'}, {counts}"
        lines.append(("column", f"{column.name}: {values}; {use}{why}"))
    clients, sizes = one.clients, one.clients.sizes or {}
    named = ", ".join(f"{name} {count:,}" for name, count in list(sizes.items())[:SHOWN])
    more = ", …" if len(sizes) > SHOWN else ""
    by = f"by {clients.column}: {named}{more}" if clients.column else clients.why
    lines.append(("clients", f"{clients.count}, {by}"))
    labels = f"by {one.label}; used to evaluate, never to train" if one.label else "none"
    return [*lines, ("labels", labels)]


def _advice_lines(one: Inspection) -> list[tuple[str, str]]:
    suggested = one.suggestion
    lines = [("kind", CALLED[one.kind])]
    lines += [("", text) for text in one.evidence]
    for removal in one.removals:
        lines.append(("leave out", f"{removal.augmentation}: {removal.reason}"))
    views = [word for word in suggested.words() if word.startswith("views")]
    lines.append(("views", " ".join(views)))
    lines.append(("size", f"{suggested.size}: {suggested.reasons['size']}"))
    grey = "grey" if suggested.channels == 1 else "colour"
    lines.append(("channels", f"{suggested.channels} ({grey}): {suggested.reasons['channels']}"))
    lines += [("note", text) for text in one.notes]
    if one.problems:
        return [*lines, *(("mend", text) for text in one.problems)]
    return [*lines, ("run", one.start), ("or", one.command)]
