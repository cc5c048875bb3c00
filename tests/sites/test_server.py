"""The server's side of a federation, as far as it can be seen without one."""

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from harmonium.core import files
from harmonium.core.callbacks import Callback
from harmonium.core.errors import ConfigError, EngineError, NotEnoughReplies, StoreError
from harmonium.federation.driver import Turn
from harmonium.federation.sampling import Participation
from harmonium.federation.wire import Ask
from harmonium.recipe.schema import Recipe
from harmonium.runs.start import resume as resume_here
from harmonium.runs.start import run
from harmonium.sites.folder import add_site, init, remove_site
from harmonium.sites.server import (
    ListenSettings,
    Participant,
    _added_later,
    _check_enough_sites,
    _dominance_warning,
    _enough,
    _handshake_fault,
    _LateJoiners,
    _Participants,
    _register_sites,
    _remaining_sites,
    resume,
    start,
)
from harmonium.sites.upkeep import SERVING, single_instance
from harmonium.storage.run_folder import RunFolder

SMALL = ("encoder.width=4", "encoder.out=16", "local.epochs=1", "rounds=1", "data.limit=60")


class Greeted:
    """Sites that say something to `hello`, one word after another."""

    def __init__(self, *turns: dict) -> None:
        self.turns = list(turns)

    def send_step(self, step, down, clients, seconds):
        assert step == "hello" and seconds > 0
        said = self.turns.pop(0)
        yield from ((client, said.get(client, "it was offline")) for client in clients)


def took(examples: object, public: str = "") -> dict:
    return {"up": {"examples": examples, "public": public}, "why": ""}


@pytest.fixture
def federation(tmp_path: Path):
    return init(tmp_path / "federation", ["north", "south", "west"], ["localhost"])


def test_the_roll_names_everyone_who_does_not_take_part(federation, monkeypatch) -> None:
    monkeypatch.setattr("harmonium.sites.server.RETRY_PAUSE", 0.0)
    notes: list[str] = []
    refusal = {"up": None, "why": "the site's policy refuses this plan"}
    engine = Greeted({0: took(10)}, {1: refusal}, {2: took(7)})
    roll, absent = _register_sites(
        engine, dict(enumerate(federation.sites)), "", None, notes.append
    )
    assert absent == ["south does not take part: the site's policy refuses this plan"]
    assert [(one.client, one.name, one.examples) for one in roll] == [
        (0, "north", 10),
        (2, "west", 7),
    ]
    assert "south does not take part: the site's policy refuses this plan" in notes
    assert notes.count("south: it was offline; waiting for it") == 1


def test_sites_are_awaited_for_a_limited_time(federation) -> None:
    notes: list[str] = []
    engine = Greeted(*[{0: took(10)}] * 100)
    roll, _ = _register_sites(engine, dict(enumerate(federation.sites)), "", 0.05, notes.append)
    assert [one.name for one in roll] == ["north"]
    assert "west does not take part: it did not connect within 0.05 s" in notes


class Coming:
    """Sites that come one after another, each with what it says to a greeting."""

    def __init__(self, *turns: dict) -> None:
        self.turns, self.asked = list(turns), []

    def handshake(self, clients, seconds, round):
        assert round == 2
        self.asked.append(list(clients))
        said = self.turns.pop(0) if self.turns else {}
        yield from ((client, said[client]) for client in clients if client in said)


def test_a_site_that_came_late_or_refused_joins_later(federation, monkeypatch) -> None:
    notes: list[str] = []
    monkeypatch.setattr("harmonium.sites.server.SHORTEST_PAUSE", 0.0)
    refusal = {"up": None, "why": "3 of 9 images cannot be read"}
    engine = Coming({1: refusal}, {1: refusal, 2: took(0)}, {1: took(9), 2: "its node is gone"})
    late = _LateJoiners(engine, dict(enumerate(federation.sites)), "", 3, notes.append)
    assert [late.handshake([1, 2], 2), late.handshake([1, 2], 2)] == [[], []]
    (found,) = late.handshake([1, 2], 2)
    assert (found.client, found.name, found.examples) == (1, "south", 9)
    assert notes.count("south does not take part yet: 3 of 9 images cannot be read") == 1
    assert notes[-1] == "south joins with 9 images"


def test_a_site_that_refused_is_not_asked_all_the_time(federation) -> None:
    engine = Coming({1: {"up": None, "why": "no"}})
    late = _LateJoiners(engine, dict(enumerate(federation.sites)), "", 3, lambda text: None)
    assert [late.handshake([1, 2], 2) for _ in range(3)] == [[], [], []]
    assert engine.asked == [[1, 2], [2], [2]]


def test_a_site_that_was_added_later_has_no_place_in_the_run(federation) -> None:
    begun = _Participants.new(federation)
    grown = add_site(federation.folder, "east")
    strangers = _added_later(grown, begun.invited, 3)
    assert {client: site.name for client, site in strangers.items()} == {3: "east"}
    notes: list[str] = []
    late = _LateJoiners(Coming({3: took(5)}), strangers, "", 3, notes.append)
    assert late.handshake([3], 2) == []
    assert notes == [
        "east does not take part yet: the run was planned for 3 sites before it was added"
    ]


def test_who_joined_is_on_the_roll_of_a_resumed_run(federation, tmp_path: Path) -> None:
    begun = _Participants.new(federation)
    names = ("recipe", "data", "public", "split", "cache", "notes", "batch_norm")
    about = dict.fromkeys(names) | {"federation": begun.plain(federation)}
    (tmp_path / "about.json").write_bytes(files.sealed(about))
    begun.joined.append(replace(begun.invited[1], examples=9))
    begun.write(tmp_path, federation)
    again = _Participants.read(tmp_path, federation)
    assert again == begun and again.joined[0].name == "south"
    assert list(_remaining_sites(federation, again.invited)) == [
        0,
        1,
        2,
    ]  # the others may still join
    assert files.read_sealed(tmp_path / "about.json")["clients"] == ["south"]


@pytest.mark.parametrize("count", [0, -5, 1.5, True, "many", None, 10**18, float("nan")])
def test_a_number_of_images_that_is_none_is_refused(count: object) -> None:
    assert "images" in _handshake_fault({"examples": count, "public": ""}, "")


def test_public_images_must_be_the_same() -> None:
    assert not _handshake_fault({"examples": 3, "public": "a"}, "a")
    assert "public images" in _handshake_fault({"examples": 3, "public": "b"}, "a")


def test_too_few_do_not_begin() -> None:
    plan = Recipe.of("fedavg", "clients=3", "participation.quorum=2")
    one = Participant(0, 0, "north", "f", 5)
    with pytest.raises(NotEnoughReplies, match="no site takes part"):
        _check_enough_sites(plan, [])
    with pytest.raises(NotEnoughReplies, match="1 site.* too few: participation.quorum is 2"):
        _check_enough_sites(plan, [one])
    _check_enough_sites(plan, [one, one])
    masked = Recipe.of("fedavg", "clients=3", "privacy.secure_aggregation=true")
    with pytest.raises(NotEnoughReplies, match="needs at least 3 clients"):
        _check_enough_sites(masked.changed(data="sites"), [one, one])


def test_only_a_cohort_with_some_to_spare_may_leave_some_out() -> None:
    def enough(ask: Ask, turn: Turn, sites: int = 3, over: float = 0.5) -> int | None:
        return _enough(Participation(number=2, over=over), sites, ask, turn)

    assert enough(Ask("train", [0, 1, 2]), Turn(1, 0)) == 2
    assert enough(Ask("train", [0, 1, 2]), Turn(1, 0), sites=9) == 2  # of those on the roll
    assert enough(Ask("train", [0, 1]), Turn(1, 1)) is None  # those who answered the first ask
    assert enough(Ask("train", [0, 1, 2]), Turn(0, 0)) is None  # the start-up asks everyone
    assert enough(Ask("mask_keys", [0, 1, 2]), Turn(1, 0)) == 2
    assert enough(Ask("unmask", [0, 1, 2]), Turn(1, 0)) is None  # who began must stay
    assert enough(Ask("train", [0, 1]), Turn(1, 0), over=0.0) is None


def test_a_site_that_was_removed_or_replaced_is_not_invited(federation) -> None:
    roll = [
        Participant(n, s.number, s.name, s.fingerprint, 5) for n, s in enumerate(federation.sites)
    ]
    left = remove_site(federation.folder, "south")
    assert {client: site.name for client, site in _remaining_sites(left, roll).items()} == {
        0: "north",
        2: "west",
    }


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.4", "fed.example.org", "::"])
def test_without_tls_only_loopback_is_listened_at(host: str) -> None:
    with pytest.raises(ConfigError, match="loopback only"):
        ListenSettings(host, 1, insecure=True)


def test_runs_of_the_other_kind_are_pointed_the_right_way(tmp_path: Path, federation) -> None:
    few = ("clients=2", "evaluate.k=5", "evaluate.labels_per_class=[]", "engine.workers=0")
    run("fedavg", *SMALL, *few, out=tmp_path / "here")
    with pytest.raises(ConfigError, match="harmonium resume"):
        resume(tmp_path / "here")
    about = RunFolder(tmp_path / "here").about()
    about["federation"] = {"id": "x", "folder": str(federation.folder), "run": "y", "roll": []}
    RunFolder(tmp_path / "here").write_about(about)
    with pytest.raises(ConfigError, match="harmonium server resume"):
        resume_here(tmp_path / "here")


class Notes(Callback):
    """Keeps the notes of a run."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


def test_a_damaged_run_fails_before_it_is_announced(tmp_path: Path, federation) -> None:
    few = ("clients=3", "evaluate.k=5", "evaluate.labels_per_class=[]", "engine.workers=0")
    path, notes = tmp_path / "run", Notes()
    run("fedavg", *SMALL, *few, out=path)
    about = RunFolder(path).about()
    about["federation"] = _Participants.new(federation).plain(federation)
    RunFolder(path).write_about(about)
    (path / "result.json").unlink()
    for commit in (path / "commits").glob("*.json"):
        commit.write_text("damaged")
    with pytest.raises(StoreError, match="commits"):
        resume(path, watcher=notes, listening=ListenSettings("127.0.0.1"))
    assert notes.texts == []


def test_the_sites_that_a_server_waits_for_are_named_at_once(
    federation, tmp_path: Path, monkeypatch
) -> None:
    def no_link(*_: object) -> None:
        raise EngineError("no link")

    monkeypatch.setattr("harmonium.engines.flower.link.Link", no_link)
    recipe, notes = Recipe.of("fedavg", "data=sites"), Notes()
    with pytest.raises(EngineError, match="no link"):
        start(recipe, federation.folder, out=tmp_path / "run", watcher=notes)
    assert "waiting for north, south, west" in notes.texts


def test_one_server_of_a_federation_at_a_time(federation, tmp_path: Path) -> None:
    """A second one would take the link of the first away."""
    with (
        single_instance(federation.folder, SERVING, "server"),
        pytest.raises(StoreError, match="another server of"),
    ):
        recipe, soon = Recipe.of("fedavg", "data=sites"), ListenSettings("127.0.0.1", wait=0.0)
        start(recipe, federation.folder, out=tmp_path / "run", listening=soon)
    assert not (tmp_path / "run").exists()


def test_a_port_that_is_taken_is_named(federation, tmp_path: Path) -> None:
    recipe = Recipe.of("fedavg", "data=sites")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        place = ListenSettings("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(EngineError, match=r"cannot listen at 127.0.0.1:\d+: Address already"):
            start(recipe, federation.folder, out=tmp_path / "run", listening=place)


def test_what_gathers_all_images_cannot_run_with_sites(federation, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="centralised"):
        recipe, soon = Recipe.of("centralised", "data=sites"), ListenSettings("127.0.0.1", wait=0.0)
        start(recipe, federation.folder, out=tmp_path / "run", listening=soon)


def test_a_federation_that_is_none_is_one_line(tmp_path: Path) -> None:
    recipe = Recipe.of("fedavg", "data=sites")
    with pytest.raises(StoreError, match="harmonium server init"):
        start(recipe, tmp_path)
    init(tmp_path / "empty", [], ["localhost"])
    with pytest.raises(ConfigError, match="has no sites"):
        start(recipe, tmp_path / "empty")


def test_a_site_that_would_outweigh_all_others_is_named() -> None:
    plan = Recipe.of("fedavg")
    roll = [Participant(c, c, f"site-{c}", "0" * 64, n) for c, n in enumerate((10, 10**6, 20))]
    assert "site-1 reports 1,000,000 of all 1,000,030 images" in _dominance_warning(plan, roll)
    assert not _dominance_warning(plan, roll[:2]) and not _dominance_warning(
        plan, [roll[0], roll[2], roll[0]]
    )
    assert not _dominance_warning(Recipe.of("fedavg", "server.weighting=uniform"), roll)
