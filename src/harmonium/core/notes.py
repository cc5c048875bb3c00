"""Notes for the user that have a level, and a form without names of images for logs."""

from __future__ import annotations

from typing import Literal

Level = Literal["error", "warning", "info", "debug"]


class Note(str):
    """A text for the user. A plain `str` in its place is a note at the level `info`.

    >>> Note("left out: 1 of 9 images cannot be read: scan-7.png", "warning", "1 of 9 images").brief
    '1 of 9 images'
    """

    level: Level
    brief: str | None  # what a log has in its place unless it is at the level debug; none: the text

    def __new__(cls, text: str, level: Level = "info", brief: str | None = None) -> Note:
        """A note; `brief` is for texts that may name images or files of a site."""
        note = super().__new__(cls, text)
        note.level, note.brief = level, brief
        return note
