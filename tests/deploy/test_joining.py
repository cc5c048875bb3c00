"""Deployments in which a site comes late, refuses at first, or was added too late; and its end."""

import json

import pytest

pytestmark = pytest.mark.deploy
MORE = ("rounds=8", "local.epochs=10", "engine.patience=5")


def test_a_site_that_comes_late_joins(stage, seen):
    """The run begins without a site after --wait; it comes later and takes part from then on."""
    stage.init()
    stage.allow("join_late: false", "join_late: true", "west")
    server = stage.server(*MORE, options=("--wait", "15"))
    early = [stage.site(name) for name in ("north", "south")]
    server.says("west does not take part: it did not connect within 15 s", "2 of 3 clients")
    stage.until(1)
    west = stage.site("west")
    said = server.ends()
    assert "west joins with" in said
    for site in (*early, west):
        assert "the run is over" in site.ends()
    rounds = [line["round"] for line in stage.ledger() if line["client"] == 2]
    assert rounds and rounds[0] >= 2 and rounds == list(range(rounds[0], 9))
    assert {line["outcome"] for line in stage.ledger()} == {"answered"}
    (path,) = stage.folder.glob("federation/kits/west/kept/runs/*/run.json")
    assert json.loads(path.read_text())["participants"] == ["north", "south", "west"]
    stage.say("eval", str(path.parent), "knn", "on=digits", "--out", "judged")
    here = json.loads((stage.folder / "judged" / "eval.json").read_text())
    stage.say("eval", "run", "knn", "on=digits", "--out", "again")
    there = json.loads((stage.folder / "again" / "eval.json").read_text())
    assert list(here["measures"]["knn"].values()) == list(there["measures"]["knn"].values())
    seen(f"joined in round {rounds[0]} of 8")


def test_a_site_that_refused_joins_once_it_accepts(stage, seen):
    """A policy refuses the plan, then late joining; its file is changed while the run goes on."""
    stage.init()
    stage.allow("methods: none", "methods: [fedsc]", "west")
    server = stage.server("rounds=40", *MORE[1:])
    stage.sites()
    server.says("west does not take part: ")
    stage.until(1)
    stage.allow("methods: [fedsc]", "methods: none", "west")
    server.says("west does not take part yet: ", "`join_late` is false")
    stage.allow("join_late: false", "join_late: true", "west")
    said = server.ends()
    assert "west joins with" in said
    seen(said[said.index("west joins") :].partition("\n")[0])


def test_a_site_that_was_added_during_a_run_learns_so(stage):
    """A run is resumed after a site was added: the site waits for the next run and says why."""
    stage.init(sites=("north", "south"))
    server = stage.server(*MORE)
    sites = [stage.site(name, once=False) for name in ("north", "south")]
    stage.until(1)
    server.kill()
    stage.say("server", "add", "west")
    west = stage.site("west", once=False)
    again = stage.resume()
    west.says("takes part in the next one", seconds=60)
    again.ends()
    assert {line["client"] for line in stage.ledger()} == {0, 1}
    assert all(site.process.poll() is None for site in sites)
