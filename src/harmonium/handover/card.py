"""The model card of a bundle, as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from statistics import median
from typing import Any

from harmonium.core.errors import counted
from harmonium.core.registry import recipe_name
from harmonium.handover.account import Account, Left
from harmonium.handover.bundle import ONNX, PROGRAM, SIGNATURE, SUMS
from harmonium.learning.encoders.given import Given
from harmonium.report import sites
from harmonium.report.results import probe_table
from harmonium.report.run_progress import size_of
from harmonium.report.tables import markdown
from harmonium.runs.export import LoadedEncoder

MOST_CLIENTS = 50  # of whom a table has a row each
UNKNOWN_LICENCE = (
    "Not stated. Ask whoever gave you this bundle before you use it: the terms of the images that "
    "it was trained on may bind its use."
)


def card(
    account: Account,
    encoder: LoadedEncoder,
    left_out: Mapping[str, str],
    signed_by: str,
    licence: str,
) -> str:
    """The text of `MODEL_CARD.md`.

    Args:
        account: of the run.
        encoder: the encoder of the bundle.
        left_out: files that the bundle does not have, with the reason.
        signed_by: the fingerprint of the key that signs the bundle; empty: it is not signed.
        licence: its terms in the exporter's words; empty: not stated.
    """
    sections = {
        "Use": _use(account, encoder, left_out),
        "Training data": _data(account, encoder),
        "Training": _training(account),
        "How good it is": _figures(account),
        "Privacy": _privacy(account),
        "What left each client": _left(account),
        "Limits": _limits(account, encoder),
        "Licence": [licence or UNKNOWN_LICENCE],
        "Check": _check(signed_by),
    }
    height, width = encoder.size
    labels = "with" if account.recipe.any_method().reads_labels else "without"
    lines = [
        f"# {_name(encoder)}, trained by {encoder.method} on {encoder.data}",
        "",
        f"An image encoder: it turns an image into {encoder.features} numbers that classifiers, "
        f"searches and clusterings can use. It was trained {labels} labels on images of "
        f"{height} x {width} pixels with {counted(encoder.channels, 'channel')}.",
    ]
    for title, text in sections.items():
        lines += ["", f"## {title}", "", *text]
    return "\n".join(lines) + "\n"


def grey_levels(account: Account, encoder: LoadedEncoder) -> dict[str, str]:
    """How grey values of more than 8 bits became bytes, in words, by the kind of file."""
    levels = encoder.levels
    if levels.window is not None:
        centre, width = levels.window
        how = f"the window of centre {centre:g} and width {width:g}, as DICOM defines windows"
        return {"dicom": f"after its rescale, {how}", "grey16": how, "float": how}
    if levels.percentiles is not None:
        low, high = levels.percentiles
        how = f"percentile {low:g} of each image is black, percentile {high:g} white"
        return {"dicom": f"after its rescale, without padding, {how}", "grey16": how, "float": how}
    depth = levels.depth
    other = "" if account.simulated else "; a site may have set another rule for its own files"
    return {
        "dicom": (
            "after its rescale, the file's own window or lookup table, the first if it has "
            f"several; without one, the full range of its stored bits; not by depth{other}"
        ),
        "grey16": f"by depth: 0 is black, {(1 << depth) - 1} ({depth} bits) and above white{other}",
        "float": f"not taken{other}",
    }


def is_named(about: Mapping[str, Any]) -> bool:
    """Whether an encoder is one of Harmonium's, which its metadata names; others must be given."""
    name = str(about["encoder"]["name"])
    return ":" not in name and name != recipe_name(Given)


def _name(encoder: LoadedEncoder) -> str:
    about = encoder.about["encoder"]
    return str(about.get("network") or about["name"])


def _use(account: Account, encoder: LoadedEncoder, left_out: Mapping[str, str]) -> Iterator[str]:
    """Code that works in the folder of the bundle."""
    height, width = encoder.size
    whiten = f", whiten={encoder.whitening.directions}" if encoder.whitening else ""
    yield (
        f"Give it images as they are: uint8 of any size, channels last. {_fitted(encoder)} All "
        "preparation is inside; do not resize or normalise before."
    )
    if encoder.channels in (1, 3):  # grey images have no other number
        yield from _deep(account, encoder)
    if is_named(encoder.about):
        yield from ("", "With Harmonium:", "")
        yield from _python(
            "import numpy as np",
            "import harmonium",
            "",
            f'encoder = harmonium.load_encoder("."{whiten})',
            f"images = np.zeros((5, {2 * height}, {3 * width}, {encoder.channels}), np.uint8)",
            "features = encoder.embed(images)  # also a folder of image files",
        )
    if ONNX not in left_out:
        yield from ("", "With onnxruntime, without Harmonium and PyTorch:", "")
        yield from _python(
            "import numpy as np",
            "import onnxruntime",
            "",
            f'session = onnxruntime.InferenceSession("{ONNX}")',
            f"images = np.zeros((5, {2 * height}, {3 * width}, {encoder.channels}), np.uint8)",
            'features = session.run(["features"], {"images": images})[0]',
        )
    if PROGRAM not in left_out:
        yield from ("", "With PyTorch alone, on images that are prepared already (`config.json`):")
        yield ""
        shape = ", ".join(str(side) for side in _prepared_shape(encoder))
        yield from _python(
            "import torch",
            "",
            f'network = torch.export.load("{PROGRAM}").module()',
            f"features = network(torch.zeros(5, {shape}))",
        )
        yield ""
        yield "Check the bundle first (see below): torch.export.load may execute code of a program."
    for name, why in left_out.items():
        yield from ("", f"The bundle has no `{name}`: {why}.")


def _deep(account: Account, encoder: LoadedEncoder) -> Iterator[str]:
    """How images of more than 8 bits become bytes."""
    how = grey_levels(account, encoder)
    yield ""
    yield (
        "Harmonium reads files of more than 8 bits as those of training. For the other forms below "
        "make bytes of them first, by the same rule (`grey_levels` of `config.json`):"
    )
    yield ""
    names = {"dicom": "DICOM", "grey16": "16-bit grey", "float": "floating-point grey"}
    yield from (f"- {name}: {how[key]}." for key, name in names.items())
    yield "- MONOCHROME1 of DICOM is inverted afterwards, so that 0 is black."


def _python(*lines: str) -> Iterator[str]:
    yield "```python"
    yield from lines
    yield "```"


def _prepared_shape(encoder: LoadedEncoder) -> tuple[int, int, int]:
    side = encoder.about["prepare"]["size"]
    return (encoder.channels, *((side, side) if side else encoder.size))


def _fitted(encoder: LoadedEncoder) -> str:
    """How images of another shape and with other channels are brought to those of training."""
    size = f"{encoder.size[0]} x {encoder.size[1]}"
    how = {
        "cut": f"They are scaled to cover {size} pixels, and the centre is cut out.",
        "resize": f"They are stretched to {size} pixels.",
        "pad": f"They are scaled to fit inside {size} pixels, with black around them.",
    }[encoder.fit]
    if encoder.channels in (1, 3):
        kinds = {1: "Colour becomes grey", 3: "Grey becomes colour"}[encoder.channels]
        return f"{how} {kinds}, and transparency white."
    return f"{how} They must have {encoder.channels} channels."


def _data(account: Account, encoder: LoadedEncoder) -> Iterator[str]:
    """A summary that names no file and no client."""
    yield f"- Data: {encoder.data}"
    if account.at_site:
        yield "- The images of the other sites stayed with them; this site knows only its own."
    elif account.examples:
        counts = [*account.examples.values()]
        total = f"{sum(counts):,} images at {counted(len(counts), 'client')}"
        each = f"{min(counts):,} to {max(counts):,} each, median {median(counts):,.0f}"
        yield f"- Training: {total} ({each})"
    if account.federation is not None:
        yield "- The images stayed at the sites, so nobody else has looked at them"
    elif account.simulated:
        yield f"- Split among clients: {_brief(account.recipe.split)}"
    for key, words in (("data", "images"), ("split", "split")):
        if key in account.digests:
            yield f"- SHA-256 of the {words}: `{account.digests[key]}`"


def _training(account: Account) -> Iterator[str]:
    recipe = account.recipe
    planned = "" if account.rounds == recipe.rounds else f" of {recipe.rounds} planned"
    yield f"- Method: {recipe.method.name}; objective: {_brief(recipe.objective)}"
    yield f"- Encoder: {_brief(recipe.encoder)}"
    yield f"- Rounds: {account.rounds}{planned}; clients: {recipe.clients}; seed: {recipe.seed}"
    if account.result.stopped:
        yield f"- Stopped early: {account.result.stopped}"
    yield f"- SHA-256 of the recipe: `{recipe.digest}`"
    if account.method:
        yield from ("", "What the method sends and keeps:", "", "```")
        yield from account.method
        yield "```"


def _brief(settings: Any) -> str:
    """The name of a choice and its plain settings; texts stay out, as they may be paths.

    >>> from harmonium.learning.objectives.simclr import SimCLR
    >>> _brief(SimCLR(temperature=0.2)).partition(",")[0]
    'simclr (temperature=0.2'
    """
    shown = [
        f"{one.name}={value}"
        for one in fields(settings)
        if isinstance(value := getattr(settings, one.name), int | float)
    ]
    return f"{settings.name} ({', '.join(shown)})" if shown else str(settings.name)


def _figures(account: Account) -> Iterator[str]:
    """Probes with their references, and figures of the sites' own images."""
    at_sites = account.result.sites
    names, rows = probe_table(account.result)
    if rows or "all" not in at_sites:
        yield from _probes(account, names, rows)
    if at_sites:
        yield from ([""] if rows or "all" not in at_sites else [])
        # A site's summary never has figures of single sites, whatever the aggregation.
        yield from _at_sites({"by_site": (), **at_sites} if account.at_site else at_sites)


def _at_sites(figures: Mapping[str, Any]) -> Iterator[str]:
    """Figures that the sites counted on their own images; sites have numbers here, no names."""
    numbered = [
        {key: value for key, value in row.items() if key != "site"}
        for row in figures.get("by_site", ())
    ]
    if rows := sites.rows({**figures, "by_site": numbered}):
        yield f"{sites.title(figures)}:"
        yield from ("", *markdown(rows, digits=1).splitlines(), "")
        yield f"{sites.LEGEND}."
        yield ""
    yield from (f"Evaluation at the sites: {text}." for text in sites.remarks(figures))


def _probes(
    account: Account, names: Sequence[str], rows: Sequence[tuple[str, list[str]]]
) -> Iterator[str]:
    """Probes with their references, or that there are none."""
    if not rows:
        yield (
            "It was not evaluated with labels"
            + (": the server of the federation had no images." if account.federation else ".")
            + " Evaluate it on labelled images of your own before you rely on it."
        )
        return
    yield (
        "Accuracy on held-out test images in percent, of classifiers on the frozen features. The "
        "other columns are references: an encoder below raw pixels or its untrained self has "
        "learnt nothing useful for this task."
    )
    yield ""
    yield from _table(["probe", *names], _named_rows(rows))
    for text in (account.result.verdict, *account.result.reasons):
        if text:
            yield from ("", text)


def _named_rows(rows: Sequence[tuple[str, list[str]]]) -> Iterator[tuple[str, ...]]:
    """Rows whose labels stand alone: those indented belong to the probe above them."""
    probe = ""
    for label, cells in rows:
        if label.startswith(" "):
            yield (f"{probe}, {label.strip()}", *cells)
        else:
            probe = label
            yield (label, *cells)


def _privacy(account: Account) -> Iterator[str]:
    """The account of noisy releases, and of what was sent without noise."""
    if account.at_site:
        yield "What this site has spent is in its own log: `harmonium client log`."
        return
    yield from (f"- {' '.join(line.split())}" for line in account.privacy)


def _left(account: Account) -> Iterator[str]:
    """Bytes by client and kind, from the ledger."""
    left = account.left
    if not left:
        yield "Nothing: no client was asked for anything."
        return
    kinds = list(dict.fromkeys(kind for sizes in left.values() for kind in sizes))
    totals = Counter[str]()
    for sizes in left.values():
        totals.update(sizes)
    if account.simulated:
        yield (
            "This run was a simulation: all clients were on one machine, which had their images, "
            "so nothing left a site. These bytes are what each client would send in a federation."
        )
        yield ""
    whose = "this site" if account.at_site else "each client"
    yield f"Bytes that left {whose}, by the kind that the exchange declares, from the ledger."
    yield ""
    rows = [*_rows(left, kinds)] if len(left) <= MOST_CLIENTS else [*_spread(left, kinds)]
    yield from _table(["client", *kinds, "in all"], [*rows, ("all", *_cells(totals, kinds))])


def _rows(left: Left, kinds: Sequence[str]) -> Iterator[tuple[str, ...]]:
    yield from ((str(client), *_cells(sizes, kinds)) for client, sizes in left.items())


def _spread(left: Left, kinds: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The clients that sent least, the median and most, where there are too many for a row each."""
    ordered = sorted(left.values(), key=lambda sizes: sum(sizes.values()))
    for label, sizes in (
        ("least", ordered[0]),
        (f"median of {len(ordered)}", ordered[len(ordered) // 2]),
        ("most", ordered[-1]),
    ):
        yield (label, *_cells(sizes, kinds))


def _cells(sizes: Mapping[str, int], kinds: Sequence[str]) -> list[str]:
    return [size_of(sizes.get(kind, 0)) for kind in kinds] + [size_of(sum(sizes.values()))]


def _limits(account: Account, encoder: LoadedEncoder) -> Iterator[str]:
    """What a user should not expect."""
    height, width = encoder.size
    yield f"- Details that vanish at {height} x {width} pixels are lost to it."
    yield (
        "- It has learnt from the images above. On images of another kind, device or population it "
        "may be worse: measure it there, with labels, beside raw pixels."
    )
    yield (
        "- It is no classifier and no medical device. Features of rare kinds of images may be "
        "poor, and may differ between groups of people: check the groups that matter to you."
    )
    yield (
        "- Its weights may reveal whether an image was among those of training, unless the noise "
        "above rules that out."
    )
    if account.result.figures.get("health", {}).get("warnings"):
        yield from (f"- {text}" for text in account.result.figures["health"]["warnings"])


def _check(signed_by: str) -> Iterator[str]:
    if signed_by:
        yield f"Signed by the key with the fingerprint `{signed_by}`."
        yield (
            "Get the public key from its owner, not from whoever gave you the bundle: `server.pub` "
            "of a federation, or the file of whoever signed with a key of their own, such as "
            "`site.pub`. Put its path for PUBLIC_KEY:"
        )
        key = " --key PUBLIC_KEY"
    else:
        yield "This bundle is not signed: its digests show damage, not who made it."
        key = ""
    yield from ("", "```", f"harmonium verify .{key}", "```", "")
    yield "Without Harmonium:"
    yield from ("", "```", f"sha256sum -c {SUMS}")
    if signed_by:
        yield f"openssl dgst -sha256 -verify PUBLIC_KEY -signature {SIGNATURE} {SUMS}"
    yield "```"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield f"|---|{'---:|' * (len(heads) - 1)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)
