"""Runs of these tests draw no pictures of themselves: that would take longer than the runs."""

from collections.abc import Iterator

import pytest

from harmonium.runs.loop import Life


@pytest.fixture(scope="module", autouse=True)
def _undrawn() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Life, "_picture", lambda self: None)
        yield
