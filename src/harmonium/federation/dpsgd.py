"""Requirements of DP-SGD on a method: no image may influence another's gradient.

The training step itself is `learning/dpsgd.py`.
"""

from __future__ import annotations

from harmonium.core.errors import ConfigError
from harmonium.federation.method import Method
from harmonium.learning.contract import called
from harmonium.learning.objectives.byol import BYOL

_OWN = (
    "train",
    "see",
    "score",
    "fit",
    "loss",
    "after_step",
)  # a method's own may do anything


def check(method: Method) -> None:
    """Refuse DP-SGD where it would not protect single images."""
    why = "local.dp_clip protects single images only if none influences another's gradient"
    objective = method.objective
    if isinstance(objective, BYOL) and objective.update == "before":
        raise ConfigError(
            f"{why}: objective.update=before moves the target at every image; set "
            "objective.update=after"
        )
    if not objective.alone():
        raise ConfigError(
            f"{why}: objective={objective.name} does not guarantee that; choose byol, "
            "simsiam, rotation or autoencoder"
        )
    if odd := [term.name for term in method.terms if not term.alone]:
        raise ConfigError(f"{why}: terms.{odd[0]} does not guarantee that")
    own = [name for name in _OWN if getattr(type(method), name) is not getattr(Method, name)]
    if own:
        raise ConfigError(f"{why}: {called(method)} overrides local training")
    if norms := [key for key in method.blueprint.state_dict() if key.endswith("running_mean")]:
        part = norms[0].partition(".")[0]
        raise ConfigError(
            f"{why}: {part} has BatchNorm; choose norms without it (encoder.norm, objective.norm)"
        )
    if method.updates is not None and method.updates.noise:
        raise ConfigError("local.dp_noise and privacy.update_noise protect twice: choose one")
