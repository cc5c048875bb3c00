"""Harmonium: one image encoder from unlabelled images that never leave their clients.

The few names a user imports. They are loaded when first used, so `import harmonium` is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from harmonium import privacy as privacy
    from harmonium.core import errors as errors
    from harmonium.core.callbacks import Callback as Callback
    from harmonium.data.inspection import inspect as inspect
    from harmonium.federation.method import Method as Method
    from harmonium.handover.export import export as export
    from harmonium.handover.verify import verify as verify
    from harmonium.learning.encoders import Encoder as Encoder
    from harmonium.learning.objectives import Objective as Objective
    from harmonium.measures.evaluation import evaluate_run as evaluate_run
    from harmonium.recipe.schema import Recipe as Recipe
    from harmonium.report.run_progress import progress as progress
    from harmonium.runs.export import load_encoder as load_encoder
    from harmonium.runs.loop import Result as Result
    from harmonium.runs.plan import plan as plan
    from harmonium.runs.start import resume as resume
    from harmonium.runs.start import run as run
    from harmonium.studies.comparison.study import compare as compare
    from harmonium.studies.comparison.sweep import sweep as sweep
    from harmonium.studies.diagnosis import diagnose as diagnose
    from harmonium.studies.evidence.study import study as study
    from harmonium.studies.start import start as start
    from harmonium.studies.tuning.study import tune as tune
    from harmonium.testing import check_method as check_method
    from harmonium.use.embedding import embed as embed
    from harmonium.use.probe import apply_probe as apply_probe
    from harmonium.use.probe import fit_probe as fit_probe
    from harmonium.use.probe import read_probe as read_probe
    from harmonium.use.search import search as search

_WHERE = {
    "Callback": "harmonium.core.callbacks",
    "Encoder": "harmonium.learning.encoders",
    "Method": "harmonium.federation.method",
    "Objective": "harmonium.learning.objectives",
    "Recipe": "harmonium.recipe.schema",
    "Result": "harmonium.runs.loop",
    "apply_probe": "harmonium.use.probe",
    "check_method": "harmonium.testing",
    "compare": "harmonium.studies.comparison.study",
    "diagnose": "harmonium.studies.diagnosis",
    "embed": "harmonium.use.embedding",
    "evaluate_run": "harmonium.measures.evaluation",
    "export": "harmonium.handover.export",
    "fit_probe": "harmonium.use.probe",
    "inspect": "harmonium.data.inspection",
    "load_encoder": "harmonium.runs.export",
    "plan": "harmonium.runs.plan",
    "progress": "harmonium.report.run_progress",
    "read_probe": "harmonium.use.probe",
    "resume": "harmonium.runs.start",
    "run": "harmonium.runs.start",
    "search": "harmonium.use.search",
    "start": "harmonium.studies.start",
    "study": "harmonium.studies.evidence.study",
    "sweep": "harmonium.studies.comparison.sweep",
    "tune": "harmonium.studies.tuning.study",
    "verify": "harmonium.handover.verify",
}
_MODULES = {"errors": "harmonium.core.errors", "privacy": "harmonium.privacy"}
__all__ = sorted(_WHERE)  # noqa: PLE0605


def __dir__() -> list[str]:
    return [*__all__, *_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    raise AttributeError(f"module 'harmonium' has no attribute '{name}'")
