"""What a search found as one HTML file: thumbnails inside, no scripts, nothing from elsewhere.

It follows the reader's light or dark scheme and the width of the screen, and every image has a text
that says what it is.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape

import numpy as np
from PIL import Image

from harmonium.report.contact_sheets import FoundRow

QUALITY = 88  # of the thumbnails, which are JPEG

_STYLE = """
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --pale: #666; --line: #ddd; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --paper: #16181b; --pale: #a0a4a8; --line: #33373c; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 80rem; color: var(--ink);
  background: var(--paper); font: 1rem/1.45 system-ui, sans-serif; }
h1 { font-size: 1.3rem; }
h2 { font-size: 1rem; overflow-wrap: anywhere; }
p, figcaption { color: var(--pale); }
section { border-top: 1px solid var(--line); padding: .5rem 0 1rem; }
ol { display: grid; grid-template-columns: repeat(auto-fill, minmax(7rem, 1fr)); gap: .75rem;
  margin: 0; padding: 0; list-style: none; }
figure { margin: 0; }
img, .none { display: block; width: 100%; aspect-ratio: 1; border-radius: .3rem;
  background: var(--line); }
.query img, .query .none { outline: 3px solid #0072b2; outline-offset: 1px; }
figcaption { font-size: .8rem; overflow-wrap: anywhere; padding-top: .25rem; }
figcaption b { color: var(--ink); font-variant-numeric: tabular-nums; }
"""


def search_page(title: str, rows: Sequence[FoundRow], lines: Sequence[str] = ()) -> str:
    """The page of a search.

    Args:
        title: its heading.
        rows: queries with their neighbours.
        lines: sentences below the heading.

    >>> "<h1>a &lt; b</h1>" in search_page("a < b", [])
    True
    """
    parts = [f"<p>{escape(line)}</p>" for line in lines]
    for row in rows:
        own = _figure(row.pixels, f"Query image {row.query}", "query", row.query)
        found = [
            _figure(
                one.pixels,
                f"Image {one.name}, number {place} nearest to {row.query}, cosine {one.cosine:.3f}",
                f"{one.cosine:.3f}",
                one.name,
            )
            for place, one in enumerate(row.neighbours, 1)
        ]
        items = [f'<li class="query">{own}</li>', *(f"<li>{one}</li>" for one in found)]
        parts += [f"<section><h2>{escape(row.query)}</h2>", "<ol>", *items, "</ol></section>"]
    head = [
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>",
    ]
    body = [f"<body><main><h1>{escape(title)}</h1>", *parts, "</main></body></html>", ""]
    return "\n".join([*head, *body])


def _figure(pixels: np.ndarray | None, words: str, lead: str, name: str) -> str:
    """An image with its caption; a grey square where it cannot be shown."""
    caption = f"<figcaption><b>{escape(lead)}</b> {escape(name)}</figcaption>"
    if pixels is None:
        text = escape(f"{words} (not shown)", quote=True)
        return f'<figure><div class="none" role="img" aria-label="{text}"></div>{caption}</figure>'
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "JPEG", quality=QUALITY)
    source = f"data:image/jpeg;base64,{base64.b64encode(data.getvalue()).decode()}"
    height, width = pixels.shape[:2]
    size = f'width="{width}" height="{height}" loading="lazy"'
    alt = escape(words, quote=True)
    return f'<figure><img src="{source}" {size} alt="{alt}">{caption}</figure>'
