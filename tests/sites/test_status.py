"""The state of a federation, read from its folder: what is well, and what somebody should do."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from harmonium.cli import federation_status
from harmonium.cli.main import main
from harmonium.core import files
from harmonium.engines.protocol import Speaker
from harmonium.federation.driver import Reply
from harmonium.recipe.schema import Recipe
from harmonium.runs.open_run import read_recipe
from harmonium.runs.start import run
from harmonium.sites import status
from harmonium.sites.activity import FINISHED, ClientActivity, ServerActivity
from harmonium.sites.folder import init
from harmonium.sites.log import SiteLog
from harmonium.sites.status import client_status, server_status
from harmonium.sites.upkeep import RUNNING, SERVING, single_instance

SITES = ("north", "south", "west")
NOW = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S}+00:00"


def words(found: dict[str, Any]) -> str:
    """What needs attention, and what to do, in one text."""
    return "\n".join(f"{one['what']}: {one['do']}" for one in found["attention"])


@pytest.fixture
def called(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str]]:
    def call(*command: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["harmonium", *command])
        monkeypatch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit) as end:
            main()
        output = capsys.readouterr()
        return int(end.value.code or 0), output.out + output.err

    return call


# ---- a server ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, undrawn: None) -> Path:
    """A complete run of three clients."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    small = {"data.limit": 60, "clients": 3, "rounds": 3, "encoder.width": 4, "encoder.out": 16}
    small |= {"evaluate.labels_per_class": [], "engine.workers": 0, "local.epochs": 1}
    run("fedavg", data="digits", out=folder, **small)
    return folder


@pytest.fixture
def federation(tmp_path: Path) -> Path:
    return init(tmp_path / "federation", SITES, ["localhost"]).folder


@pytest.fixture
def begun(federation: Path, trained: Path, tmp_path: Path) -> Path:
    """The federation with a run that stopped after its last round."""
    folder = tmp_path / "run"
    for path in trained.rglob("*"):
        if path.is_file():
            (folder / path.relative_to(trained)).parent.mkdir(parents=True, exist_ok=True)
            (folder / path.relative_to(trained)).write_bytes(path.read_bytes())
    (folder / "result.json").unlink()
    roll = [
        {"client": n, "number": n, "name": name, "fingerprint": "f", "examples": 20}
        for n, name in enumerate(SITES)
    ]
    about = files.read_sealed(folder / "about.json")
    about["federation"] = {"id": "i", "folder": str(federation), "run": "a" * 32, "roll": roll}
    (folder / "about.json").write_bytes(files.sealed(about))
    return folder


def serving(federation: Path, folder: Path) -> ServerActivity:
    activity = ServerActivity(federation, SITES)
    activity.names = dict(enumerate(SITES))
    activity.about_run(folder=str(folder), rounds=3, round=3)
    return activity


@pytest.fixture
def server(federation: Path, begun: Path) -> Iterator[ServerActivity]:
    """A server that runs, with all sites online."""
    activity = serving(federation, begun)
    activity.online(SITES)
    activity.joined(SITES)
    for name in SITES:
        activity.heard(name, Speaker(time=time.time()))
    with single_instance(federation, SERVING, "server"), activity.activity.running():
        os.utime(max((begun / "commits").glob("*.json")))
        yield activity


def written(activity: ServerActivity | ClientActivity) -> None:
    activity.activity._write()


def test_a_new_federation_is_well_and_says_what_is_next(
    federation: Path, called: Callable[..., tuple[int, str]]
) -> None:
    found = server_status(federation)
    assert not found["attention"] and found["run"] is None and not found["server"]["running"]
    assert [(one["site"], one["in_run"]) for one in found["sites"]] == [(n, False) for n in SITES]
    assert "harmonium server start" in found["next"][0]
    code, text = called("server", "status", str(federation))
    assert code == 0 and "all is well" in text and all(name in text for name in SITES)
    code, text = called("server", "status", str(federation), "--json")
    assert code == 0 and set(json.loads(text)) == set(found)
    code, text = called("server", "status", str(federation / "nowhere"))
    assert code == 2 and "Traceback" not in text


def test_a_status_is_shown_again_until_it_is_stopped(
    federation: Path, called: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = iter([None, KeyboardInterrupt])

    def pause(seconds: float) -> None:
        if error := next(pauses):
            raise error

    monkeypatch.setattr(federation_status.time, "sleep", pause)
    code, text = called("server", "status", str(federation), "--watch")
    assert code == 130 and text.count("all is well") == 2
    assert called("server", "status", str(federation), "--watch", "--json")[0] == 2


def test_a_running_server_is_well(
    federation: Path, server: ServerActivity, called: Callable[..., tuple[int, str]]
) -> None:
    found = server_status(federation)
    assert not found["attention"], words(found)
    assert found["server"]["running"] and found["server"]["pid"] == os.getpid()
    assert (found["run"]["round"], found["run"]["rounds"], found["run"]["left"]) == (3, 3, 0.0)
    north = found["sites"][0]
    assert (north["images"], north["answered"], north["missed"], north["connected"]) == (
        *(20, 3, 0),
        True,
    )
    code, text = called("server", "status", str(federation))
    assert code == 0 and "running" in text and "3 of 3" in text


def test_a_complete_run_needs_no_server(federation: Path, begun: Path, trained: Path) -> None:
    with (activity := serving(federation, begun)).activity.running():
        activity.about_run(complete=True)
    (begun / "result.json").write_bytes((trained / "result.json").read_bytes())
    found = server_status(federation)
    assert not found["attention"] and found["run"]["complete"]
    assert found["next"] and "harmonium eval" in found["next"][0]


@pytest.mark.parametrize("killed", [False, True])
def test_a_server_that_stopped_is_resumed(
    killed: bool, federation: Path, begun: Path, called: Callable[..., tuple[int, str]]
) -> None:
    with serving(federation, begun).activity.running():
        left = (federation / "status.json").read_bytes()
    if killed:
        (federation / "status.json").write_bytes(left)
    found = server_status(federation)
    assert f"harmonium server resume {begun}" in words(found)
    assert ("killed or crashed" in words(found)) == killed
    code, text = called("server", "status", str(federation))
    assert code == 1 and "harmonium server resume" in text


def test_sites_that_are_away_late_or_refused_are_named(
    federation: Path, server: ServerActivity, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.online(SITES[:2])
    with server.site("west") as west:
        west["seen"] = time.time() - 600
    with server.site("south") as south:
        south |= {"clock": 9.0, "protocol": 9, "version": "9.9"}
    server.task(Reply(1, None, "its node is gone"))
    written(server)
    found = server_status(federation)
    assert len(found["attention"]) == 3
    assert "west is not connected; last seen: 10 minutes ago" in words(found)
    assert "south's clock is 9 s ahead" in words(found) and "9.9" in words(found)
    assert found["sites"][1]["why"] == "its node is gone"


def test_a_site_that_joins_nothing_says_why(federation: Path, tmp_path: Path) -> None:
    activity = serving(federation, tmp_path / "not begun")
    activity.online(SITES)
    activity.absent("west", "the site's policy refuses this plan")
    with single_instance(federation, SERVING, "server"), activity.activity.running():
        found = server_status(federation)
    assert found["server"]["waiting"] and found["run"] is None
    assert len(found["attention"]) == 1
    assert "west does not take part: the site's policy refuses this plan" in words(found)


def test_a_site_that_never_connected_is_named_after_a_while(
    federation: Path, tmp_path: Path, called: Callable[..., tuple[int, str]]
) -> None:
    activity = serving(federation, tmp_path / "not begun")
    activity.online(SITES[:2])
    activity.joined(SITES[:2])
    with single_instance(federation, SERVING, "server"), activity.activity.running():
        found = server_status(federation)
        assert not found["attention"]
        assert [one["in_run"] for one in found["sites"]] == [True, True, False]
        code, text = called("server", "status", str(federation))
        assert code == 0 and "the server waits for west" in text
        with activity.activity.changing() as facts:
            facts["started"] -= 2 * status.GRACE
        written(activity)
        assert "west is not connected; last seen: never" in words(server_status(federation))
        assert called("server", "status", str(federation))[0] == 1


def test_an_evaluation_declined_is_no_round_missed(
    federation: Path, begun: Path, server: ServerActivity
) -> None:
    path, why = begun / "ledger.jsonl", "`evaluation` is false"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    measure = {"step": "can_evaluate", "client": 2, "outcome": "no answer", "why": why}
    lines += [{**lines[-1], **measure, "round": number} for number in (1, 2, 3)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for commit in (begun / "commits").glob("*.json"):
        commit.unlink()
    (begun / "metrics.jsonl").write_text(
        (begun / "metrics.jsonl").read_text().split("\n")[0] + "\n"
    )
    west = server_status(federation)["sites"][2]
    assert (west["answered"], west["missed"], west["row"]) == (3, 0, 0)
    assert west["why"] == f"evaluation: {why}"
    declined = Reply(2, None, why, measuring=True)
    server.task(declined)
    written(server)
    assert server_status(federation)["sites"][2]["why"] == f"evaluation: {why}"
    assert declined.absence == f"did not take part in an evaluation: {why}"


def test_a_server_without_rounds_is_reported(
    federation: Path, begun: Path, server: ServerActivity
) -> None:
    for path in (begun / "commits").glob("*.json"):
        os.utime(path, (time.time() - 3600, time.time() - 3600))
    assert "no round was committed for 60 minutes" in words(server_status(federation))


def test_answers_that_did_not_count_are_told_by_round(
    federation: Path, begun: Path, server: ServerActivity
) -> None:
    path = begun / "ledger.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["client"] == 2:
            line |= {"outcome": "refused" if line["round"] == 1 else "no answer", "why": "of it"}
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for commit in (begun / "commits").glob("*.json"):  # as if it had been so from the start
        commit.unlink()
    (begun / "metrics.jsonl").write_text(
        (begun / "metrics.jsonl").read_text().split("\n")[0] + "\n"
    )
    found = server_status(federation)
    west = found["sites"][2]
    assert (west["answered"], west["missed"], west["refused"], west["row"]) == (0, 2, 1, 3)
    assert west["why"] == "of it" and "west has no counted answer" in words(found)


def test_epsilon_of_sites_is_counted_and_nearly_spent(
    federation: Path, begun: Path, server: ServerActivity, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = ("privacy.update_noise=2", "privacy.update_clip=1", "privacy.epsilon=9")
    noisy = (*noise, "batch_norm=local", "privacy.noise=simulated")
    recipe = Recipe.of(read_recipe(begun), *noisy)
    path = begun / "ledger.jsonl"
    lines = [{**json.loads(line), "releases": [{}]} for line in path.read_text().splitlines()]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines if line["client"] < 2))
    for commit in (begun / "commits").glob("*.json"):
        commit.unlink()
    (begun / "metrics.jsonl").unlink()
    monkeypatch.setattr(status, "read_recipe", lambda folder: recipe)
    found = server_status(federation)
    spent = [site["epsilon"] for site in found["sites"]]
    assert spent[0] == spent[1] > spent[2] == 0.0
    assert found["sites"][0]["epsilon_limit"] == 9.0
    assert ("north has spent epsilon" in words(found)) == (spent[0] >= 8.1)


def test_certificates_that_end_soon_are_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = init(tmp_path / "soon", ["north"], ["localhost"], days=10).folder
    assert "harmonium server renew" in words(server_status(folder))
    later = time.time() + 20 * 86400
    monkeypatch.setattr(status.time, "time", lambda: later)
    assert "expired on" in words(server_status(folder))


def test_a_broken_key_is_reported_and_the_rest_is_shown(federation: Path) -> None:
    (federation / "server" / "signing.pub").write_text("no key")
    found = server_status(federation)
    assert "signing.pub" in words(found) and len(found["sites"]) == 3


def test_a_damaged_run_is_reported_and_the_rest_is_shown(federation: Path, begun: Path) -> None:
    with serving(federation, begun).activity.running():
        (begun / "about.json").write_text("{")
    found = server_status(federation)
    assert "about.json" in words(found) and len(found["sites"]) == 3


def test_a_full_disk_is_reported(federation: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "LEAST_FREE", 2**62)
    assert "MB left" in words(server_status(federation))


def test_looking_changes_nothing(federation: Path, server: ServerActivity) -> None:
    def seen() -> list[tuple[str, int, int]]:
        everything = sorted(federation.rglob("*"))
        return [(str(p), p.stat().st_mtime_ns, p.stat().st_size) for p in everything]

    kit = federation / "kits" / "north"
    before = seen()
    server_status(federation)
    client_status(kit)
    assert seen() == before


# ---- a site --------------------------------------------------------------------------------------


@pytest.fixture
def kit(federation: Path) -> Path:
    return federation / "kits" / "north"


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    (tmp_path / "scans").mkdir()
    (tmp_path / "scans" / "1.png").write_bytes(b"x")
    return tmp_path / "scans"


@pytest.fixture
def client(kit: Path, scans: Path) -> Iterator[ClientActivity]:
    """A client that runs and is connected."""
    (kit / "kept").mkdir(mode=0o700)
    data = {"name": "folder", "path": str(scans)}
    activity = ClientActivity(kit / "kept", "localhost:8443", data, "cpu")
    activity.images(812, 0)
    activity.contact(None)
    with single_instance(kit / "kept", RUNNING, "client"), activity.activity.running():
        yield activity


def entry(**more: Any) -> dict[str, Any]:
    sent = {"model": {"kind": "weights", "bytes": 100}, "loss": {"kind": "scalar", "bytes": 8}}
    about = {"time": NOW, "run": "b" * 32, "plan": "p" * 64, "round": 4, "step": "train"}
    return {**about, "outcome": "sent", "up": sent, "down": 50, "policy": "e" * 64, **more}


def test_a_client_that_never_ran_is_to_be_started(
    kit: Path, called: Callable[..., tuple[int, str]]
) -> None:
    found = client_status(kit)
    assert not found["client"]["running"] and "harmonium client start" in words(found)
    assert found["server"]["address"] == "localhost:8443"
    code, text = called("client", "status", str(kit))
    assert code == 1 and f"client start --kit {kit}" in text.replace("\n", " ")
    code, text = called("client", "status", str(kit.parent))
    assert code == 2 and "kit.yaml" in text
    code, text = called("client", "status", str(kit / "nowhere"))
    assert code == 2 and "there is no folder" in text and "--kit" in text


def test_a_connected_client_is_well(
    kit: Path, client: ClientActivity, called: Callable[..., tuple[int, str]]
) -> None:
    log = SiteLog(kit / "kept" / "log.jsonl")
    log.append(entry(round=3))
    log.append(entry(policy=files.digest_of((kit / "policy.yaml").read_bytes())))
    found = client_status(kit)
    assert not found["attention"], words(found)
    assert found["sent"] == {"weights": 200, "scalar": 16} and found["received"] == 100
    assert (found["run"]["round"], found["run"]["answers"]) == (4, 2)
    assert found["images"]["count"] == 812 and found["images"]["readable"]
    assert found["policy"]["valid"] and not found["policy"]["changed"]
    assert found["budget"]["limit"] == 10.0 and found["asks"] == {"sent": 2}
    code, text = called("client", "status", str(kit))
    assert code == 0 and "all is well" in text and "812" in text
    code, text = called("client", "status", str(kit), "--json")
    assert code == 0 and json.loads(text)["site"] == "north"
    (kit / "policy.yaml").write_text("rounds: 5\n")
    found = client_status(kit)
    assert found["policy"]["changed"] and not found["attention"]


def test_a_lost_connection_is_reported_with_its_reason(kit: Path, client: ClientActivity) -> None:
    client.contact("the server at localhost:8443 cannot be reached")
    written(client)
    assert "cannot be reached" in words(client_status(kit))
    client.contact(None)
    written(client)
    assert not client_status(kit)["attention"]


def test_a_client_whose_run_is_over_is_well(kit: Path) -> None:
    (kit / "kept").mkdir()
    client = ClientActivity(kit / "kept", "x:1", {"name": "digits", "path": ""}, "cpu")
    with client.activity.running():
        client.finished(FINISHED)
    assert not client_status(kit)["attention"]


def test_an_invalid_policy_a_refusal_and_a_broken_log_are_reported(
    kit: Path, client: ClientActivity
) -> None:
    log = SiteLog(kit / "kept" / "log.jsonl")
    log.append(entry(outcome="refused", why="it has local.epochs=10, but `epochs` is 5", up={}))
    assert "local.epochs=10" in words(client_status(kit))
    (kit / "policy.yaml").write_text("epoch: 5\n")
    found = client_status(kit)
    assert "policy.yaml" in words(found) and not found["policy"]["valid"]
    log.path.write_bytes(log.path.read_bytes().replace(b"epochs=10", b"epochs=11"))
    assert "tampered" in words(client_status(kit))


def test_images_that_are_gone_are_reported(kit: Path, client: ClientActivity, scans: Path) -> None:
    client.images(812, 3)
    written(client)
    assert "3 images cannot be read" in words(client_status(kit))
    (scans / "1.png").unlink()
    found = client_status(kit)
    assert found["images"]["readable"] is False and str(scans) in words(found)


def test_a_budget_that_is_nearly_spent_is_reported(kit: Path, client: ClientActivity) -> None:
    (kit / "policy.yaml").write_text("epsilon: 2.2\n")
    release = {"mechanism": "gaussian", "sensitivity": 1.0, "scale": 2.0, "count": 1}
    SiteLog(kit / "kept" / "log.jsonl").append(entry(releases=[release]))
    found = client_status(kit)
    assert 0.9 * 2.2 <= found["budget"]["spent"] <= 2.2, found["budget"]
    assert "epsilon" in words(found)


def test_a_kit_that_is_full_is_reported(kit: Path, client: ClientActivity) -> None:
    (kit / "settings.yaml").write_text("limits:\n  disk: 0.000001\n")
    (kit / "kept" / "runs").mkdir()
    (kit / "kept" / "runs" / "state").write_bytes(b"x" * 2000)
    assert "limits.disk" in words(client_status(kit))


def test_a_client_that_hangs_is_reported(
    kit: Path, client: ClientActivity, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = time.time() + 300
    monkeypatch.setattr(status.time, "time", lambda: later)
    assert "has not reported" in words(client_status(kit))
