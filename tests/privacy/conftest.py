"""Runs of these tests draw no plots: that would take longer than the runs."""

from collections.abc import Iterator

import pytest

from harmonium.runs.loop import RunLoop


@pytest.fixture(scope="module", autouse=True)
def _undrawn() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunLoop, "_plot", lambda self: None)
        yield
