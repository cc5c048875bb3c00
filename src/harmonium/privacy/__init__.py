"""Protection of what leaves a client: noise, its records, and the privacy loss they amount to.

`harmonium.privacy.report(folder)` reads a run's ledger, `harmonium.privacy.plan(...)` computes how
much noise a budget requires.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harmonium.privacy.planning import plan as plan
    from harmonium.runs.privacy_report import report as report

_WHERE = {"plan": "harmonium.privacy.planning", "report": "harmonium.runs.privacy_report"}
__all__ = sorted(_WHERE)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'harmonium.privacy' has no attribute '{name}'")
