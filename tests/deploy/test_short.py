"""One short real deployment: a server and three sites over TLS, each a process of its own."""

import json

import harmonium


def test_three_sites_learn_one_encoder(stage):
    """Three sites over TLS with keys of their own."""
    stage.init()
    server = stage.server("rounds=2", "participation.quorum=2")
    sites = stage.sites("data.limit=240")
    said = server.ends()
    for name, actor in sites.items():
        assert f"{name} takes part with 80 pictures" in said
        assert "the run is over" in actor.ends()
    ledger = stage.ledger()
    assert len(ledger) == 6 and {line["outcome"] for line in ledger} == {"answered"}

    # Every site has the encoder that the server has, and its log says what left it.
    found = list(stage.folder.glob("federation/kits/*/kept/runs/*/encoder.safetensors"))
    there = harmonium.load_encoder(stage.folder / "run" / "encoder.safetensors").state_dict()
    assert len(found) == 3
    for path in found:
        here = harmonium.load_encoder(path).state_dict()
        assert all((here[key] == there[key]).all() for key in there)
    log = json.loads(stage.say("client", "log", "--kit", "federation/kits/south", "--json"))
    assert [entry["outcome"] for entry in log["entries"]] == ["greeted", "sent", "sent", "finished"]
    south = [line["up"] for line in ledger if line["client"] == 1]
    sizes = {key: sum(up[key] for up in south) for key in ("model", "loss")}
    assert log["totals"]["bytes"] == {"weights": sizes["model"], "scalar": sizes["loss"]}

    # What is secret is its owner's alone, and nothing lies outside the folders.
    for pattern in ("*.key", "answer-*", "log.jsonl"):
        assert all(path.stat().st_mode & 0o077 == 0 for path in stage.folder.rglob(pattern))
    house = stage.folder / "house"
    assert not [path for path in house.rglob("*") if "flwr" in path.name]
