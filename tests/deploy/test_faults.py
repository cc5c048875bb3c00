"""Deployments in which something dies, hangs, comes late or comes back."""

import os
import signal
import time

import pytest

from harmonium.core.errors import counted

pytestmark = pytest.mark.deploy

# Work for some seconds a round, so that a kill falls into the middle of it; and sites that keep
# something between rounds, so that a state that was lost or counted twice would show.
LONG = ("method=scaffold", "local.epochs=30", "engine.patience=150")


@pytest.fixture(scope="module")
def quiet(tmp_path_factory, play):
    """The encoder of the long plan when nothing goes wrong."""
    return play(tmp_path_factory.mktemp("quiet"), *LONG)


def killed(stage, actor, round=1):
    """Kill an actor in the middle of the round after this one."""
    stage.until(round)
    time.sleep(1.5)
    assert stage.committed() == round
    actor.kill()


def test_a_killed_site_returns(stage, quiet, seen):
    """A site is killed (-9) in the middle of a round and started again at once."""
    stage.init()
    server, sites = stage.server(*LONG), stage.sites()
    killed(stage, sites["south"])
    began = time.monotonic()
    stage.site("south")
    server.ends()
    assert stage.encoder() == quiet
    assert {line["outcome"] for line in stage.ledger()} == {"answered"}
    seen(f"run ends {time.monotonic() - began:.0f} s after the kill, with the bits of a quiet run")


def test_a_killed_site_stays_away(stage, seen):
    """A site is killed and stays away; the quorum is met without it."""
    stage.init()
    server = stage.server("local.epochs=30", "engine.patience=5", "participation.quorum=2")
    sites = stage.sites()
    killed(stage, sites["west"])
    said = server.ends()
    missing = [line for line in stage.ledger() if line["outcome"] != "answered"]
    assert [(line["client"], line["round"]) for line in missing] == [(2, 2), (2, 3)]
    assert "west did not take part: its node is gone" in said
    seen(f"named in the ledger: {missing[0]['why']}")


def test_below_the_quorum_the_run_stops_and_goes_on_later(stage, seen):
    """Too few are left: the round is tried again, then the run stops and is resumed later."""
    stage.init()
    more = ("engine.patience=3", "engine.tries=2", "participation.quorum=3")
    server = stage.server(*LONG, *more)
    sites = stage.sites(once=False)
    killed(stage, sites["west"])
    said = server.ends(2)
    assert "round 2 is tried again" in said and "continue with: harmonium server resume" in said
    assert stage.committed() == 1
    stage.site("west", once=False)
    stage.resume("engine.patience=150").ends()
    assert {line["outcome"] for line in stage.ledger()} == {"answered"}
    seen("exit code 2, nothing averaged; `server resume` completes it")


def test_a_killed_server_resumes(stage, quiet, seen):
    """The server is killed (-9) in the middle of a round and resumed at once."""
    stage.init()
    server, sites = stage.server(*LONG), stage.sites()
    killed(stage, server)
    began = time.monotonic()
    stage.resume().ends()
    assert stage.encoder() == quiet
    for site in sites.values():
        site.ends()
    seen(f"run ends {time.monotonic() - began:.0f} s after the kill, with the bits of a quiet run")


def test_a_killed_superlink_is_replaced(stage, quiet, children, seen):
    """The SuperLink is killed (-9) in the middle of a round."""
    stage.init()
    server, _ = stage.server(*LONG), stage.sites()
    stage.until(1)
    time.sleep(1.0)
    (link,) = [pid for pid in children(server.process.pid) if "superlink" in words_of(pid)]
    began = time.monotonic()
    os.kill(link, signal.SIGKILL)
    server.ends()
    assert stage.encoder() == quiet
    seen(f"run ends {time.monotonic() - began:.0f} s after, with the bits of a quiet run")


def test_a_hanging_site_is_named(stage, seen):
    """A site hangs (SIGSTOP) beyond the deadline, then wakes up and takes part again."""
    stage.init()
    server = stage.server("engine.deadline=12", "participation.quorum=2", "local.epochs=2")
    sites = stage.sites()
    stage.until(0)
    server.says("round 1/3")
    sites["north"].send(signal.SIGSTOP)
    server.says("north did not take part")
    sites["north"].send(signal.SIGCONT)
    server.ends()
    lost = [line for line in stage.ledger() if line["outcome"] != "answered"]
    assert {line["client"] for line in lost} == {0}
    seen(f"named in the ledger: {lost[0]['why']}")


def test_the_slowest_of_a_cohort_is_not_waited_for(stage, seen):
    """Over-selection: two of three are wanted, the slowest is left out by name."""
    stage.init()
    stage.allow("join_late: false", "join_late: true", "west")
    server = stage.server("participation.number=2", "participation.over=0.5", "rounds=2")
    sites = [stage.site("north"), stage.site("south")]
    slow = stage.site("west")
    stage.until(0)
    slow.send(signal.SIGSTOP)
    server.says("round 2/2")
    slow.send(signal.SIGCONT)
    server.ends()
    left = [line for line in stage.ledger() if line["outcome"] != "answered"]
    assert left and {line["client"] for line in left} == {2}
    assert all("not needed: 2 had answered before it" in line["why"] for line in left)
    assert all("the run is over" in site.ends() for site in sites)
    seen(f"{counted(len(left), 'round')} went on without it")


def test_masked_answers_survive_a_death(stage, seen):
    """Secure aggregation with four sites, of which one is killed after it sent its shares."""
    names = ("north", "south", "west", "east")
    stage.init(sites=names)
    more = ("privacy.secure_aggregation=true", "objective.norm=none", "local.epochs=10")
    server = stage.server(*more, "engine.patience=4", "participation.quorum=3")
    sites = {name: stage.site(name) for name in names}
    stage.until(1)
    end = time.monotonic() + 60
    log = stage.folder / "federation" / "kits" / "east" / "kept" / "log.jsonl"
    while log.read_text().count('"mask_shares"') < 2:  # of round 2: it trains now
        assert time.monotonic() < end
        time.sleep(0.02)
    time.sleep(0.5)
    sites["east"].kill()
    server.ends()
    last = [line for line in stage.ledger() if line["round"] == 2 and line["step"] == "train"]
    assert {line["client"]: line["outcome"] for line in last}[3] == "no answer"
    kinds = {
        name for line in stage.ledger() if line["step"] == "train" for name in line.get("up", {})
    }
    assert kinds == {"model", "loss"}
    seen("its masks were taken away by the shares of the others")


def words_of(pid: int) -> str:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read().decode(errors="replace")
