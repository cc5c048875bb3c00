"""One bad answer refuses one client, by name, and leaves nothing behind.

The answers of a real trial are played again with one of them replaced: whatever a client sends, the
round must come to what it comes to without that client.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from harmonium.core import codec
from harmonium.core.errors import ConfigError, Diverged, NotEnoughReplies, WireError
from harmonium.federation.aggregation import NormBound
from harmonium.federation.driver import Driver, Reply
from harmonium.federation.filters import arrival
from harmonium.federation.ledger import Ledger
from harmonium.federation.method import Method
from harmonium.federation.sampling import Participation
from harmonium.federation.wire import exchange, statistic, weights
from harmonium.testing import RecordedAsk, Trial, first_trial

OWN: dict[str, dict[str, Any]] = {
    "fedca": {"method": {"name": "fedca", "align_epochs": 1, "size": 32}},
    "orchestra": {
        "method": {"name": "orchestra", "clusters": 4, "local_clusters": 3, "global_steps": 5}
    },
    "fedsc": {"objective": {"name": "spectral", "form": "fedsc", "out": 8}},
    "fedavg with verification": {"terms": "uv"},
    "fedsc with noise": {
        "method": {"name": "fedsc", "sigma": 0.0005},
        "objective": {"name": "spectral", "form": "fedsc", "out": 8},
    },
}


@cache
def trial(name: str) -> Trial:
    return first_trial(name.partition(" ")[0], **OWN.get(name, {}))


def heard(name: str, step: str) -> RecordedAsk:
    return next(one for one in reversed(trial(name).recorded) if one.ask.step == step)


def scaled(name: str, by: float) -> Callable[[Any], Any]:
    return lambda up: {**up, name: by * up[name]}


def put(**values: Any) -> Callable[[Any], Any]:
    return lambda up: {**up, **values}


def model(key: str, change: Callable[[Tensor], Any]) -> Callable[[Any], Any]:
    def changed(up: Mapping[str, Any]) -> dict[str, Any]:
        name = next(k for k in up["model"] if k.endswith(key))
        return {**up, "model": {**up["model"], name: change(up["model"][name])}}

    return changed


class Exploding(dict):  # type: ignore[type-arg]
    """Fields that fail when they are looked at."""

    def items(self) -> Any:
        raise ZeroDivisionError("no reading of this")


LIES: dict[str, tuple[str, str, Callable[[Any], Any], str]] = {
    "a model far away": ("fedavg", "train", model("weight", lambda w: w + 3e38), "sane range"),
    "a model a million times": ("fedavg", "train", model("weight", lambda w: w * 1e8), "sane"),
    "a loss as text": ("fedavg", "train", put(loss="low"), "loss.*number"),
    "a loss beyond any float": ("fedavg", "train", put(loss=10**400), "not finite"),
    "a loss beyond any range": ("fedavg", "train", put(loss=-1e200), "sane range"),
    "a model as rows": ("fedavg", "train", put(model=torch.ones(3)), "dict of named tensors"),
    "fields that explode": ("fedavg", "train", Exploding, "cannot be read: ZeroDivisionError"),
    "no fields": ("fedavg", "train", lambda up: [up], "no fields"),
    "a long row": (
        "fedavg with verification",
        "train",
        model("uv.weight", lambda w: 2 * w),
        "length 2, not 1",
    ),
    "no row": (
        "fedavg with verification",
        "train",
        model("uv.weight", torch.zeros_like),
        "length 0, not 1",
    ),
    "a far matrix": ("fedsc", "correlate", put(corr=torch.full((36,), 3e38)), "sane range"),
    "a large matrix": ("fedsc", "correlate", scaled("corr", 1e8), "beyond 0 and mu"),
    "a negated matrix": ("fedsc", "correlate", scaled("corr", -1.0), "beyond 0 and mu"),
    "a negated noisy one": (
        "fedsc with noise",
        "correlate",
        scaled("corr", -1.0),
        "beyond 0 and mu",
    ),
    "a short matrix": ("fedsc", "correlate", put(corr=torch.ones(35)), r"\(35,\), not \(36\)"),
    "a matrix of doubles": ("fedsc", "correlate", lambda up: {"corr": up["corr"].double()}, "64"),
    "short rows": ("fedca", "train", put(rows=torch.ones(4, 7)), r"\(4, 7\), not \(0 to"),
    "rows without axes": ("fedca", "train", put(rows=torch.ones(())), r"\(\), not"),
    "one row": ("fedca", "train", put(rows=torch.ones(4)), r"\(4,\), not"),
    "a pile of rows": ("fedca", "train", put(rows=torch.ones(2, 3, 4)), r"\(2, 3, 4\), not"),
    "large rows": ("fedca", "train", scaled("rows", 1e6), "unit length"),
    "zero rows": ("fedca", "train", scaled("rows", 0.0), "unit length"),
    "equal rows": (
        "fedca",
        "train",
        lambda up: {**up, "rows": up["rows"][:1].expand(len(up["rows"]), -1)},
        "1 different row",
    ),
    "many rows": ("fedca", "train", lambda up: {**up, "rows": up["rows"].repeat(100, 1)}, "not"),
    "more rows than asked for": (
        "fedca",
        "train",
        lambda up: {**up, "rows": torch.cat([up["rows"], -up["rows"][:1]])},
        "were asked for",
    ),
    "a tensor for a number": ("orchestra", "train", put(anonymity=torch.ones(2)), "number"),
    "half an image": ("orchestra", "train", put(anonymity=2.5), "whole number of images"),
    "more images than there are": ("orchestra", "train", put(anonymity=10**6), "whole number"),
    "many centroids": (
        "orchestra",
        "train",
        lambda up: {**up, "centroids": up["centroids"].repeat(500, 1)},
        r"not \(0 to 3,",
    ),
    "long centroids": ("orchestra", "train", scaled("centroids", 5.0), "unit length"),
    "no such cluster": ("featarc-clustered", "choose", put(cluster=7), "whole number below 2"),
    "fewer images than none": ("cbafed", "count", scaled("labelled", -1.0), "does not count"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_refuses_the_client_and_leaves_nothing_behind(lie: str) -> None:
    name, step, tell, why = LIES[lie]
    found, method = heard(name, step), trial(name).method
    liar = next(
        one for one in found.replies if one.up and not any(_empty(v) for v in one.up.values())
    )
    silent, _ = found.replayed(method, Reply(liar.client, None, "lost"))
    came, entries = found.replayed(method, replace(liar, up=tell(liar.up)))
    entry = entries.pop(liar.client)
    assert entry["outcome"] == "refused"
    assert re.search(why, entry["why"]), entry["why"]
    assert came == silent
    assert {one["outcome"] for one in entries.values()} <= {"answered", "no answer"}
    honest, _ = found.replayed(method)
    assert honest != silent


def _empty(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.numel()


# ---- whatever is sent ----------------------------------------------------------------------------
def replayed(found: RecordedAsk, method: Method, tell: Callable[[int], bool], up: Any) -> Driver:
    """A driver that was told the same lie by several clients."""
    replies = [replace(one, up=up(one.up)) if tell(one.client) else one for one in found.replies]
    engine = type("Engine", (), {"deliver": lambda *_: iter(replies), "accept": lambda *_: None})()
    driver = Driver(method, engine, Ledger())
    driver._ask(found.ask, found.turn, found.server)
    return driver


def test_a_round_in_which_most_are_refused_is_not_counted() -> None:
    found, method = heard("fedavg", "train"), trial("fedavg").method
    assert len(found.replies) == 4
    replayed(found, method, lambda client: client < 2, put(loss="low"))  # half of them: it counts
    with pytest.raises(NotEnoughReplies, match="answers of 3 of 4 clients were refused.*not count"):
        replayed(found, method, lambda client: client < 3, put(loss="low"))
    with pytest.raises(Diverged, match="not finite.*diverged"):
        far = model("weight", lambda w: w + 3e38)
        replayed(found, method, lambda client: True, far)


def test_answers_that_cannot_be_opened_count_as_refused() -> None:
    found, method = heard("fedavg", "train"), trial("fedavg").method
    lost = [Reply(c, None, "its answer was refused", unreadable=True) for c in range(3)]
    with pytest.raises(NotEnoughReplies, match="answers of 3 of 4"):
        found.replayed(method, *lost)


def test_a_failure_at_the_server_is_not_the_clients() -> None:
    """A full disk where states are accepted is an error of its own, not a refusal."""
    found, method = heard("fedavg", "train"), trial("fedavg").method

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    engine = type("Engine", (), {"deliver": lambda *_: iter(found.replies), "accept": full})()
    with pytest.raises(OSError, match="No space left"):
        Driver(method, engine, Ledger())._ask(found.ask, found.turn, found.server)


def test_the_watcher_hears_who_was_refused_and_why() -> None:
    found, method, heard_of = heard("fedavg", "train"), trial("fedavg").method, list[Reply]()
    replies = [replace(one, up={}) if one.client == 2 else one for one in found.replies]
    engine = type("Engine", (), {"deliver": lambda *_: iter(replies), "accept": lambda *_: None})()
    Driver(method, engine, Ledger(), watch=heard_of.append)._ask(
        found.ask, found.turn, found.server
    )
    (refused,) = [one for one in heard_of if one.why]
    assert refused.client == 2 and refused.why.startswith("its answer was refused: ")


# ---- sizes ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["fedavg", "fedca", "orchestra", "fedsc"])
def test_honest_answers_are_within_their_limits(name: str) -> None:
    found = trial(name)
    for one in found.recorded:
        for reply in one.replies:
            frame = codec.encode({"up": reply.up, "why": "", "state": None, "releases": []})
            examples = found.server.examples[reply.client]
            limits = arrival.limits(found.method, one.ask.step, examples, 4)
            assert codec.decode(frame, limits)["why"] == ""
            assert limits.frame < 40 * len(frame) + 2**18


def test_a_frame_beyond_its_limits_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = codec.encode({"x": torch.zeros(10_000)})
    monkeypatch.setattr("safetensors.torch.load", lambda data: pytest.fail("it was unpacked"))
    with pytest.raises(WireError, match="frame of 40,1.. bytes.* 1,000"):
        codec.decode(frame, codec.Limits(frame=1000, header=1000))
    with pytest.raises(WireError, match="header of ... bytes.* 16"):
        codec.decode(frame, codec.Limits(frame=10**6, header=16))


def test_a_tensor_is_in_one_place() -> None:
    """A frame of a thousand references to one tensor must not become a thousand tensors."""
    honest = codec.encode({"a": torch.ones(5), "b": torch.ones(5)})
    place = b'{\\"$\\":1}'
    assert honest.count(place) == 1
    for lie, why in (
        (b'{\\"$\\":0}', "KeyError"),  # the first once more
        (b'{\\"$\\":7}', "KeyError"),  # one that is not there
        (b"123456789", "tensor 1"),
    ):
        with pytest.raises(WireError, match=why):
            codec.decode(honest.replace(place, lie))


def test_real_federations_want_shapes_declared() -> None:
    class Vague(Method):
        @exchange(down={"model": weights()}, up={"mean": statistic("each")})
        def describe(self, client, got):  # type: ignore[no-untyped-def]
            return {"mean": torch.ones(3)}

    with pytest.raises(ConfigError, match="describe .*`mean`"):
        arrival.check_declared(Vague())
    arrival.check_declared(Method())


# ---- what bounds single clients ------------------------------------------------------------------
def test_a_majority_is_more_than_half() -> None:
    half = Participation(fraction=0.5, quorum="majority")
    assert [half.least(clients) for clients in (2, 4, 10)] == [1, 2, 3]
    with pytest.raises(ConfigError, match="quorum is 0"):
        Participation(quorum=0)


def test_what_a_norm_bound_cut_off_is_reported() -> None:
    """Changes longer than the lower median of four are shortened, statistics by their own."""
    found, plain = heard("fedavg", "train"), trial("fedavg").method
    method = replace(plain, aggregation=NormBound())
    far = model("weight", lambda w: w + 100.0)
    driver = replayed(found, method, lambda client: client == 1, far)
    assert driver.reported["shortened"] in (2, 3)
    assert 0 < driver.reported["shortened_to"] < 0.01
    assert "shortened" not in replayed(found, plain, lambda client: False, None).reported


def test_a_client_left_out_is_named_in_the_ledger() -> None:
    """Three clients go one way, client 1 goes back: it answered, and its change does not count."""
    found = heard("fedavg", "train")
    method = replace(trial("fedavg").method, aggregation=NormBound(agreement=0.0))
    ahead, back = (model("weight", lambda w, by=by: w + by) for by in (10.0, -10.0))
    along = [one if one.client == 1 else replace(one, up=ahead(one.up)) for one in found.replies]
    driver = replayed(replace(found, replies=along), method, lambda client: client == 1, back)
    assert driver.reported["left_out"] == 1
    (entry,) = [line for line in map(json.loads, driver.ledger.lines) if "note" in line]
    assert entry["client"] == 1 and "left out of the mean" in entry["note"]
    assert 1 in driver.ledger.answered
