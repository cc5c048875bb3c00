"""Harmonium: one image encoder from unlabelled images that never leave their clients.

The few names a user imports. They are loaded when first used, so `import harmonium` is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from harmonium import errors as errors
    from harmonium import privacy as privacy
    from harmonium.callbacks import Callback as Callback
    from harmonium.comparing.study import compare as compare
    from harmonium.comparing.sweep import sweep as sweep
    from harmonium.diagnosis.finding import diagnose as diagnose
    from harmonium.encoders import Encoder as Encoder
    from harmonium.federation.method import Method as Method
    from harmonium.handover import load_encoder as load_encoder
    from harmonium.life import Result as Result
    from harmonium.measures.evaluation import evaluate_run as evaluate_run
    from harmonium.objectives import Objective as Objective
    from harmonium.recipe import Recipe as Recipe
    from harmonium.report.progress import progress as progress
    from harmonium.runs import resume as resume
    from harmonium.runs import run as run
    from harmonium.testing import check_method as check_method
    from harmonium.tuning.study import tune as tune

_WHERE = {
    "Callback": "harmonium.callbacks",
    "Encoder": "harmonium.encoders",
    "Method": "harmonium.federation.method",
    "Objective": "harmonium.objectives",
    "Recipe": "harmonium.recipe",
    "Result": "harmonium.life",
    "compare": "harmonium.comparing.study",
    "check_method": "harmonium.testing",
    "diagnose": "harmonium.diagnosis.finding",
    "evaluate_run": "harmonium.measures.evaluation",
    "load_encoder": "harmonium.handover",
    "progress": "harmonium.report.progress",
    "resume": "harmonium.runs",
    "run": "harmonium.runs",
    "sweep": "harmonium.comparing.sweep",
    "tune": "harmonium.tuning.study",
}
_MODULES = ("errors", "privacy")  # that users need whole
__all__ = sorted(_WHERE)  # noqa: PLE0605


def __dir__() -> list[str]:
    return [*__all__, *_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"harmonium.{name}")
    raise AttributeError(f"module 'harmonium' has no attribute '{name}'")
