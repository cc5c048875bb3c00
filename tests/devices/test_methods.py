"""Every method on a pretend accelerator: the CPU's bits, and no waiting within a task."""

from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
from tests.devices.pretend import DEVICE, counted
from tests.methods.test_contract import QUICK

from harmonium.core import codec
from harmonium.engines.local import LocalEngine
from harmonium.engines.runtime import ClientRuntime, Task
from harmonium.methods import methods
from harmonium.recipe.schema import Recipe
from harmonium.testing import Trial, first_trial


@dataclass(frozen=True)
class Counting(ClientRuntime):
    """Notes for every task how often it made the host wait."""

    def perform(self, task: Task, broadcast: bytes) -> codec.Tree:
        with counted() as waits:
            done = super().perform(task, broadcast)
        WAITS.append((task.step, +waits))
        return done


WAITS: list[tuple[str, Counter[str]]] = []


def elsewhere(recipe: Recipe, runtime: ClientRuntime, folder: Path) -> LocalEngine:
    given = {one.name: getattr(runtime, one.name) for one in fields(runtime)}
    return LocalEngine(Counting(**{**given, "device": DEVICE}), folder, workers=0)


def on_device(name: str, **settings: Any) -> tuple[Trial, Trial]:
    WAITS.clear()
    plain = first_trial(name, **settings)
    return plain, plain.again(engine=elsewhere)


@pytest.mark.parametrize("name", methods.table())
def test_every_method_has_the_bits_of_the_cpu(name: str) -> None:
    plain, there = on_device(name, **QUICK.get(name, {}))
    assert there.digest == plain.digest
    assert there.lines == plain.lines
    for step, waits in WAITS:
        print(name, step, dict(waits))
