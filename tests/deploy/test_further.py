"""A federation that starts from given weights, and trains its run further."""

import json

import pytest

import harmonium

pytestmark = pytest.mark.deploy


def test_given_weights_travel_and_a_run_is_trained_further(stage, play, tmp_path_factory):
    """Start from given weights, then train the run further: the same bits as in one go."""
    small = ("encoder.width=8", "evaluate.labels_per_class=[]", "views=digits", "clients=3")
    out = stage.folder / "before"
    harmonium.run("fedavg", *small, "rounds=1", "local.epochs=1", "engine.workers=0", out=out)
    changes = (f"init={out}", "local.schedule=constant", "evaluate.every=1")
    stage.init()
    server, sites = stage.server("rounds=1", *changes), stage.sites(once=False)
    server.ends()
    stage.resume("rounds=2").ends()
    about = json.loads((stage.folder / "run" / "about.json").read_text())
    assert [part["rounds"] for part in about["history"]] == [[1, 2]]
    assert about["init"]["file"] == str(out) and len(about["init"]["digest"]) == 64
    assert {line["outcome"] for line in stage.ledger()} == {"answered"}
    for name in sites:
        log = stage.say("client", "log", "--kit", f"federation/kits/{name}", "--json")
        entries = json.loads(log)["entries"]
        sent = [(entry["round"], entry["plan"]) for entry in entries if entry["outcome"] == "sent"]
        assert [round for round, _ in sent] == [1, 2] and len({plan for _, plan in sent}) == 2
        assert str(out) not in json.dumps(entries)
    stage.clear()
    assert stage.encoder() == play(tmp_path_factory.mktemp("whole"), "rounds=2", *changes)
