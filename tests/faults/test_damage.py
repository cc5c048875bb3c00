"""Every file of a run, damaged in every way: noticed by its path, or made again with the same bits.

The files are those that the folder has, so that a new one is tried without a word here.
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import harmonium
from harmonium.callbacks import Callback
from harmonium.errors import CallbackError, HarmoniumError
from harmonium.evaluate.judge import Judge
from harmonium.life import Life
from harmonium.measures.opened import open_run
from harmonium.privacy.reporting import report
from harmonium.recipe import Recipe
from harmonium.runs import changed_recipe, resume, run
from harmonium.testing import TINY

pytestmark = pytest.mark.usefixtures("undrawn", "unjudged")

ENDS = ("metrics.jsonl", "ledger.jsonl", "result.json", "encoder.safetensors")


@pytest.fixture(scope="module")
def unjudged() -> Iterator[None]:
    """Probes of an encoder take most of the time; its weights say as much here."""

    def judged(life: Life, judge: Any, encoders: Any, *_: Any) -> dict[str, Any]:
        sums = [float(value.double().sum()) for value in encoders[0].state_dict().values()]
        return {"figures": {"sums": sums}, "untrained": {}}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Life, "_judged", judged)
        patch.setattr(Judge, "look", lambda *_: {})
        yield


class Stop(Callback):
    """Ends a run after its second round."""

    def round(self, row: Any, seconds: float) -> None:
        if row["round"] == 2:
            raise KeyError("enough")


@dataclass
class Made:
    """A run that came to its end and one that did not, and the same of another seed."""

    done: Path
    stopped: Path
    others: dict[str, Path]
    seen: dict[tuple[str, str], Any]  # by state and deed: what an undamaged run gives


def recipe(seed: int) -> Recipe:
    """Clients keep models of their own; weights are given."""
    first = Recipe.from_tree(TINY).any_method().blueprint.copy_from()["encoder"].state_dict()
    torch.manual_seed(seed)
    given = {name: torch.randn_like(value) / 8 for name, value in first.items()}
    return Recipe.of(
        Recipe.from_tree({**TINY, "method": "ditto"}),
        **{"data.count": 16, "data.test_count": 2, "clients": 2, "rounds": 3, "seed": seed},
        **{"evaluate.every": 3, "evaluate.labels_per_class": []},
        **{"engine.workers": 0, "init": given},
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, undrawn: None, unjudged: None) -> Made:
    found: dict[str, Path] = {}
    for seed in (0, 1):
        folder = tmp_path_factory.mktemp(f"seed-{seed}")
        run(recipe(seed), out=folder / "done")
        with pytest.raises(CallbackError):
            run(recipe(seed), out=folder / "stopped", callbacks=Stop())
        found |= {f"{state}{seed}": folder / state for state in ("done", "stopped")}
    others = {"done": found["done1"], "stopped": found["stopped1"]}
    one = Made(found["done0"], found["stopped0"], others, {})
    for state in others:
        for name, deed in DEEDS[state].items():
            copy = folder / f"{name} of {state}" / "run"
            one.seen[state, name] = deed(shutil.copytree(getattr(one, state), copy))
    return one


def resumed(folder: Path) -> dict[str, Any]:
    figures = dict(resume(folder).figures)
    last = folder / "commits" / "000003.safetensors"
    return {"figures": figures, last.name: last.read_bytes()} | {
        name: (folder / name).read_bytes() for name in ENDS
    }


def evaluated(folder: Path) -> dict[str, Any]:
    """What `harmonium eval` measures; the round is in its tables."""
    found = open_run(folder, "run", changed_recipe(folder, []))
    (encoder,) = found.judged.values()
    weights = {key: value.tolist() for key, value in encoder.state_dict().items()}
    kept = {client: str(found.state(client)) for client in (0, 1)}
    return {"round": found.commit.round, "weights": weights, "kept": kept}


def loaded(folder: Path) -> dict[str, Any]:
    return {k: v.tolist() for k, v in harmonium.load_encoder(folder).network.state_dict().items()}


def spent(folder: Path) -> dict[str, Any]:
    return {key: value for key, value in vars(report(folder)).items() if key != "folder"}


def started_from(folder: Path) -> str:
    init = Recipe.of("fedavg", init=str(folder)).init
    assert init is not None
    return init.digest


DEEDS: dict[str, dict[str, Callable[[Path], Any]]] = {
    "done": {
        "eval": evaluated,
        "load": loaded,
        "privacy": spent,
        "init": started_from,
        "resume": resumed,
    },
    "stopped": {"eval": evaluated, "privacy": spent, "resume": resumed},
}


def flip(path: Path, other: Path) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[len(data) // 2] ^= 4
    path.write_bytes(data)


def swap(path: Path, other: Path) -> None:
    if not other.exists():  # its name is its digest: another of the same kind
        other = min(other.parent.glob(f"*{other.suffix}"), default=other)
    if other.exists():
        shutil.copy(other, path)


def folder_instead(path: Path, other: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path, Path], None]] = {
    "flipped": flip,
    "cut": lambda path, other: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "emptied": lambda path, other: path.write_bytes(b""),
    "deleted": lambda path, other: path.unlink(),
    "a folder": folder_instead,
    "another run's": swap,
}


def files(folder: Path) -> Iterator[Path]:
    return (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file())


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("state", DEEDS)
def test_every_damaged_file_is_named_or_made_again(
    made: Made, tmp_path: Path, state: str, damage: str
) -> None:
    whole, wrong = getattr(made, state), list[str]()
    for number, file in enumerate(files(whole)):
        place = tmp_path / str(number) / "run"
        shutil.copytree(whole, place)
        DAMAGES[damage](place / file, made.others[state] / file)
        for name, deed in DEEDS[state].items():  # the last of them may mend it
            try:
                found = deed(place)
            except HarmoniumError as error:
                told = str(error)
                if str(place / file) not in told or "\n" in told:
                    wrong.append(f"{name}, {file}: {told}")
            except BaseException as error:
                wrong.append(f"{name}, {file}: {type(error).__name__} {error}")
            else:
                usual = made.seen[state, name]
                earlier = state == "stopped" and found.get("round") != usual.get("round")
                if found != usual and not earlier:  # the round is said; resuming plays it again
                    wrong.append(f"{name}, {file}: another result")
    assert not wrong, "\n".join(wrong)
