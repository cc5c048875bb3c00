"""Published sets for tests: a few images in the exact official layout, as if fetched."""

import json

import pytest

from harmonium.core.errors import DataError
from harmonium.data.datasets import datasets
from harmonium.data.published_datasets import make_record


@pytest.fixture
def fetched(home):
    """Lay files (path: bytes) where `data fetch` would, and record them."""

    def lay(name, files):
        folder = home / "data" / name
        for path, content in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        with open(folder / "fetched.json", "w", encoding="utf-8") as file:
            json.dump(make_record(folder), file)
        return folder

    return lay


@pytest.fixture
def refused():
    """Loading by name fails with one line, which is given back."""

    def load(name, **settings):
        with pytest.raises(DataError) as caught:
            datasets[name](**settings).load()
        message = str(caught.value)
        assert "\n" not in message
        return message

    return load
