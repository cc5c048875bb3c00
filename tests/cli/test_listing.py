"""Lists say what the name tables hold, without importing what they hold."""

import json
import subprocess
import sys
from importlib import import_module

import pytest

from harmonium.cli.listing import Listed, listed
from harmonium.recipe.overrides import apply_changes
from harmonium.recipe.schema import Recipe

TABLES = {
    "methods": "harmonium.methods",
    "objectives": "harmonium.learning.objectives",
    "encoders": "harmonium.learning.encoders",
    "terms": "harmonium.learning.terms",
    "measures": "harmonium.measures",
    "splits": "harmonium.data.partition",
    "aggregations": "harmonium.federation.aggregation",
}


def first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]


@pytest.mark.parametrize("kind", TABLES)
def test_the_source_says_what_the_table_holds(kind: str) -> None:
    table = getattr(import_module(TABLES[kind]), kind).table()
    ours = {name: cls for name, cls in table.items() if cls.__module__.startswith("harmonium.")}
    assert listed(kind) == {
        name: Listed(
            first_line(cls.__doc__),
            first_line(sys.modules[cls.__module__].__doc__),
            getattr(cls, "paper", ""),
        )
        for name, cls in ours.items()
    }


@pytest.mark.parametrize("key", ["method", "objective", "encoder", "data", "split", "server"])
def test_a_setting_alone_is_one_of_the_default_choice(key: str) -> None:
    default = Recipe.from_tree({}).tree()[key]["name"]
    assert apply_changes({}, [f"{key}.x=1"])[key]["name"] == default


# Runs a command and prints, last of all, which heavy libraries it brought in and its user time.
WEIGHED = """
import json, os, sys
before = os.times().user
sys.argv = ["harmonium", *{words}]
from harmonium.cli.main import app
code = app(standalone_mode=False)
heavy = ("torch", "sklearn", "scipy", "matplotlib", "pydantic", "flwr")
print()
print(json.dumps([[one for one in heavy if one in sys.modules], os.times().user - before]))
"""
LISTS = [
    ["--version"],
    ["--help"],
    ["run", "--help"],
    ["methods"],
    ["objectives"],
    ["encoders"],
    ["measures"],
    ["datasets"],
    ["splits"],
    ["recipes"],
    ["recipes", "fedstyle"],
]


@pytest.mark.parametrize("words", LISTS, ids=" ".join)
def test_a_list_loads_no_heavy_library_and_is_quick(words: list[str], soon: float) -> None:
    """Of CPU, beyond Python's own start; a second try, for the machine may be busy."""
    for _ in range(2):
        code = WEIGHED.format(words=json.dumps(words))
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        loaded, seconds = json.loads(done.stdout.splitlines()[-1])
        assert loaded == []
        if seconds < soon:
            return
    raise AssertionError(f"{seconds:.2f} s of CPU, allowed are {soon:.2f}")
