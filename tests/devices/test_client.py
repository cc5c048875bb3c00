"""`harmonium client start --device`: tasks of a site on a pretend accelerator, and refusals."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.devices.pretend import DEVICE, NAME, counted

from harmonium.cli.main import main
from harmonium.core import codec, devices, files
from harmonium.engines.seal import nonce, seal
from harmonium.sites.folder import Federation, init
from harmonium.sites.plan import federated, frame_of, method_of, planned

SMALL = ["data.size=8", "data.channels=1", "encoder.width=4", "local.epochs=1", "local.batch=16"]
PLAN, _ = planned(federated("fedavg", SMALL), 1)


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pretence is the accelerator of this machine."""
    monkeypatch.setattr(devices, "accelerator", lambda: DEVICE)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    yield init(tmp_path / "federation", ["north"], ["localhost"])


@pytest.fixture
def start(
    federation: Federation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, list[Any]]]:
    """The command; its exit code, what it says, and what it answers to a server's asks."""

    def called(*options: str) -> tuple[int, str, list[Any]]:
        answers: list[Any] = []

        def asks(answer: Any, *_: Any, **__: Any) -> None:
            answers.extend(decoded(answer(*one)) for one in sealed(federation))

        monkeypatch.setattr("harmonium.engines.flower.node.answer_messages", asks)
        kit = federation.kit("north")
        shutil.rmtree(kit / "kept", ignore_errors=True)
        words = ["--kit", str(kit), "--data", "digits", "data.limit=60", *options]
        monkeypatch.setattr(sys, "argv", ["harmonium", "client", "start", *words])
        monkeypatch.setattr(sys, "path", list(sys.path))
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0), capsys.readouterr().err, answers
        return 0, capsys.readouterr().err, answers

    return called


def sealed(federation: Federation) -> Iterator[tuple[bytes, list[bytes]]]:
    """A handshake, and the ask of the first round."""
    model = method_of(PLAN).blueprint.shared()
    for step, number, down in (("hello", 0, {}), ("train", 1, {"model": model})):
        facts = {"down": {}, "state": None, "keep": []}
        bodies = [frame_of(PLAN), codec.encode(down), codec.encode(facts)]
        header = {"federation": federation.id, "site": 0, "run": "0" * 32, "plan": PLAN.digest}
        header |= {"round": number, "ask": 0, "step": step, "client": 0, "nonce": nonce()}
        digests = [files.digest_of(body) for body in bodies]
        yield seal("ask", header, digests, federation.signing_key()), bodies


def decoded(answer: tuple[bytes, list[bytes]]) -> Any:
    content = codec.decode(answer[1][0])
    assert content["up"] is not None, content["why"]
    return content["up"]


def test_a_site_computes_where_it_is_told_to(start: Any, federation: Federation) -> None:
    models = {}
    for name in ("cpu", NAME):
        with counted() as waits:
            code, said, (hello, trained) = start("--device", name)
            assert code == 0 and hello["examples"] == len_of(federation)
            assert (sum(waits.values()) > 0) == (name == NAME), said
        assert (f"computing on {NAME}" in said) == (name == NAME)
        models[name] = trained["model"]
        facts = json.loads((federation.kit("north") / "kept" / "status.json").read_bytes())
        assert facts["device"].partition(":")[0] == name
    assert all(torch.equal(models["cpu"][key], models[NAME][key]) for key in models["cpu"])


def len_of(federation: Federation) -> int:
    log = (federation.kit("north") / "kept" / "log.jsonl").read_text().splitlines()
    return int(json.loads(log[0])["told"]["examples"])


def test_auto_takes_no_accelerator_but_cuda(start: Any) -> None:
    with counted() as waits:
        assert start()[0] == 0 and not sum(waits.values())


@pytest.mark.parametrize("name", ["cuda", "cuda:1", f"{NAME}:1", "toaster", "cpu,cuda"])
def test_a_device_that_is_not_here_is_refused_before_an_image_is_read(
    name: str, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harmonium.sites.client.SiteImages.parse", None)
    code, said, answers = start("--device", name)
    assert code == 2 and "--device" in said and name in said and "engine.device" not in said
    assert len(said.splitlines()) == 1 and not answers
