"""Sites evaluate the encoder on their own labelled images, in a run and after it."""

import json

import pytest

pytestmark = pytest.mark.deploy


def test_sites_send_counts_in_a_run_and_after_it(stage, seen) -> None:
    """Three sites, one of which may not send counts until its policy allows it."""
    stage.init()
    for name in ("north", "south"):
        stage.allow("evaluation: false", "evaluation: true", name)
    server = stage.server("rounds=2", "evaluate.sites=ridge", "evaluate.every=1")
    sites = stage.sites(once=False)
    said = server.ends()
    assert "west did not take part" in said and "`evaluation` is false" in said
    result = json.loads((stage.folder / "run" / "result.json").read_text())["sites"]
    assert {row["site"] for row in result["by_site"]} == {"north", "south"}
    assert result["answered"] == 2 and result["of"] == 3 and result["all"]["seen"] == 0
    trained = [line for line in stage.ledger() if line["step"] == "train"]
    assert {line["client"] for line in trained} == {0, 1, 2}

    log = json.loads(stage.say("client", "log", "--kit", "federation/kits/north", "--json"))
    counts = [entry for entry in log["entries"] if entry.get("step") == "measure_counts"]
    assert {one["kind"] for one in counts[-1]["up"].values()} == {"statistic", "scalar"}
    told = next(stage.folder.glob("federation/kits/south/kept/runs/*/run.json"))
    about = json.loads(told.read_text())
    assert "all" in about["sites"] and "by_site" not in told.read_text()

    before = {path: path.read_bytes() for path in (stage.folder / "run").rglob("*.json*")}
    stage.allow("evaluation: false", "evaluation: true", "west")
    asked = stage.act("eval", "server", "eval", "run", "evaluate.sites=probe", "--out", "after")
    assert "3 of 3 sites sent counts" in asked.ends()
    after = json.loads((stage.folder / "after" / "sites.json").read_text())
    balanced = [row["balanced"] for row in after["sites"]["by_site"]]
    assert len(balanced) == 3 and balanced == sorted(balanced)
    assert len((stage.folder / "after" / "ledger.jsonl").read_text().splitlines()) == 6
    now = {path: path.read_bytes() for path in (stage.folder / "run").rglob("*.json*")}
    assert now == before
    seen(f"balanced accuracy of the worst site {balanced[0]:.2f}")
    for site in sites.values():
        site.clear()


def test_masked_counts_have_no_single_sites(stage) -> None:
    """Secure aggregation opens the sum over three sites alone."""
    stage.init()
    stage.allow("evaluation: false", "evaluation: true")
    words = ("rounds=1", "evaluate.sites=ridge", "privacy.secure_aggregation=true")
    server, _ = stage.server(*words), stage.sites()
    said = server.ends()
    assert "no figures of single sites" in said
    result = json.loads((stage.folder / "run" / "result.json").read_text())["sites"]
    assert "by_site" not in result and result["all"]["images"] > 100
