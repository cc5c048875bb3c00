"""One short real deployment: a server and three sites over TLS, each a process of its own."""

import json
from pathlib import Path

import harmonium


def test_three_sites_learn_one_encoder(stage):
    """Three sites over TLS with keys of their own, by the words of docs/federation.md."""
    page = (Path(__file__).parents[2] / "docs" / "federation.md").read_text(encoding="utf-8")
    trial = page.partition("## Try it on one machine")[2].partition("```\n")[2].partition("```")[0]
    init, start, *clients = (line.split()[1:] for line in trial.splitlines())
    stage.say(*init, "--port", str(stage.port))
    small = ("encoder.width=8", "evaluate.labels_per_class=[]", "engine.patience=30")
    start = [word.replace("rounds=5", "rounds=2").replace("runs/first", "run") for word in start]
    server = stage.act("server", *start, *small)
    sites = {
        name: stage.act(name, *words, "data.limit=240")
        for name, words in zip(("north", "south", "west"), clients, strict=True)
    }
    said = server.ends()
    for name, actor in sites.items():
        assert f"{name} takes part with 80 images" in said
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

    for path in found:
        about = json.loads(path.with_name("run.json").read_text())
        assert about["participants"] == ["north", "south", "west"] and about["round"] == 2
        assert "knn" in about["figures"] and len(about["metrics"]) == 3
        assert about["left"]["train"]["weights"] == sizes["model"]

    # What is kept is its owner's alone, and nothing lies outside the folders.
    for folder in (stage.folder / "federation", stage.folder / "run"):
        kept = [folder, *folder.rglob("*")]
        assert not [path for path in kept if path.stat().st_mode & 0o077]
    assert not list(stage.folder.glob("federation/link/flower.db*"))
    house = stage.folder / "house"
    assert not [path for path in house.rglob("*") if "flwr" in path.name]
