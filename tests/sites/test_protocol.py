"""Server and site state their protocol; they refuse each other in one line that names versions."""

import time
from pathlib import Path
from typing import Any

import pytest
from tests.sites.test_site import CLIENT, OWN, RUN, SERVER, Bench

from harmonium import __version__
from harmonium.core import codec, files
from harmonium.engines import protocol
from harmonium.engines.protocol import PROTOCOL, Speaker, protocol_fault
from harmonium.engines.remote import RemoteEngine, RemoteSite, Waits, _Body
from harmonium.engines.seal import nonce, seal, unseal
from harmonium.federation.driver import Turn


class At(Bench):
    """A bench whose server speaks as it is told."""

    says: dict[str, Any] = {}

    def bodies(self, *args: Any, **parts: Any) -> list[bytes]:
        plan, down, facts = super().bodies(*args, **parts)
        return [plan, down, codec.encode({**codec.decode(facts), **self.says})]


def test_a_site_answers_its_own_protocol_and_states_itself(tmp_path: Path) -> None:
    bench = At(tmp_path)
    for says in ({}, {"protocol": PROTOCOL, "version": "0.1.7"}):  # 0.2.0 stated nothing
        bench.says = says
        sealed, bodies = bench.ask(about={"round": 1 + len(says)})
        answer, (body,) = bench.site.answer(sealed, bodies)
        assert codec.decode(body)["up"]
        site = Speaker.of(unseal("answer", answer, [body], OWN.public_key()))
        assert (site.protocol, site.version) == (PROTOCOL, __version__)
        assert site.time is not None and abs(site.time - time.time()) < 60


def test_a_site_refuses_another_protocol_before_it_looks_at_the_plan(tmp_path: Path) -> None:
    bench = At(tmp_path)
    bench.says = {"protocol": PROTOCOL + 1, "version": "9.8.7"}
    why = bench.refusal(text=b"{")
    assert "9.8.7" in why and __version__ in why and "upgrade the site" in why
    assert not bench.opened


def test_settings_that_a_site_does_not_know_are_explained_by_versions(tmp_path: Path) -> None:
    bench = At(tmp_path)
    bench.says = {"protocol": PROTOCOL, "version": "9.8.7"}
    tree = b'{"method": "fedavg", "bewitched": 3}'
    why = bench.refusal(text=tree)
    assert "bewitched" in why and "9.8.7" in why and "Upgrading" in why
    bench.says = {"version": __version__}
    assert "Upgrading" not in bench.refusal(text=tree, about={"round": 2})
    bench.says = {"version": "9.8.7"}
    why = bench.refusal(about={"plan": "0" * 64, "round": 3})  # read differently there
    assert "the plan is not the one" in why and "9.8.7" in why


@pytest.fixture
def engine() -> RemoteEngine:
    about = {"federation": "f" * 32, "run": RUN, "plan": "p"}
    member = RemoteSite("north", 3, 17, OWN.public_key())
    carrier: Any = None
    return RemoteEngine(carrier, {CLIENT: member}, SERVER, about, b"{}", Waits())


def answered(engine: RemoteEngine, **states: Any) -> Any:
    """What the engine makes of an answer whose sender states something of itself."""
    task = engine._task("hello", Turn(0, 0), CLIENT, _Body(codec.encode({})), {})
    task.header["nonce"] = nonce()
    body = codec.encode({"up": {}, "why": ""})
    sealed = seal("answer", {**task.header, **states}, [files.digest_of(body)], OWN)
    return engine._read_answer(CLIENT, task, (sealed, [body]))


def test_a_server_refuses_another_protocol_by_name(engine: RemoteEngine) -> None:
    heard: list[Any] = []
    engine.heard = lambda client, site: heard.append((client, site))
    assert answered(engine)["up"] == {}
    assert answered(engine, protocol=PROTOCOL, version="0.3.0", time=5.0)["up"] == {}
    outcome = answered(engine, protocol=PROTOCOL + 1, version="9.8.7")
    assert isinstance(outcome, str) and "9.8.7" in outcome and "upgrade the server" in outcome
    assert [(site.version, site.time) for _, site in heard] == [
        ("", None),
        ("0.3.0", 5.0),
        ("9.8.7", None),
    ]


def test_a_server_of_another_protocol_refuses_sites_that_state_none(
    engine: RemoteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harmonium.engines.remote.Speaker", _Newer)
    outcome = answered(engine)
    assert isinstance(outcome, str) and "upgrade the site" in outcome


class _Newer(Speaker):
    def __init__(self, protocol: int = PROTOCOL + 1, *rest: Any) -> None:
        super().__init__(protocol, *rest)


@pytest.mark.parametrize(
    "about",
    [
        {"protocol": "2", "version": 5, "time": "now"},
        {"protocol": True, "version": "a\nb", "time": float("nan")},
        {"protocol": -1, "version": "x" * 41, "time": 1e300},
    ],
)
def test_what_a_speaker_cannot_be_counts_as_not_stated(about: dict[str, Any]) -> None:
    assert Speaker.of(about) == Speaker(protocol.FIRST, "", None)
    assert not protocol_fault(Speaker(), Speaker.of(about)) or PROTOCOL != protocol.FIRST
