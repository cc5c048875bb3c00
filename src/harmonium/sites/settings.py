"""How a server or a client runs at its place: logs, metrics and limits of its machine.

The settings are in `settings.yaml`, in the federation's folder and in a kit. The file need not
exist. It is read at the start, and nothing in it changes a result.
"""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from harmonium.core.errors import ConfigError, UnknownSetting, suggest
from harmonium.core.notes import Level
from harmonium.core.settings import make
from harmonium.recipe.presets import read_yaml

FILE = "settings.yaml"


@dataclass(frozen=True)
class LogSettings:
    """What is logged, and where to."""

    level: Level = "info"
    json: bool = False  # one JSON document a line, in place of plain text
    file: str | None = None  # none: standard error
    megabytes: float = 10.0  # size at which a file is renamed and a new one begun
    files: int = 5  # earlier files that are kept

    def __post_init__(self) -> None:
        if not self.megabytes > 0 or self.files < 1:
            raise ConfigError(
                f"log.megabytes is {self.megabytes:g} and log.files {self.files}: use a size above "
                "0 and at least 1 file"
            )


@dataclass(frozen=True)
class MetricsSettings:
    """Where metrics are served."""

    port: int | None = None  # none: nowhere
    address: str = "127.0.0.1"

    def __post_init__(self) -> None:
        if self.port is not None and not 0 < self.port < 65536:
            raise ConfigError(f"metrics.port is {self.port}; use 1 to 65535, or none")
        try:
            ipaddress.ip_address(self.address)
        except ValueError:
            raise ConfigError(
                f"metrics.address is {self.address}; write an address such as 127.0.0.1"
            ) from None


@dataclass(frozen=True)
class LimitSettings:
    """The most that a client may use of its machine; none: no limit."""

    memory: float | None = None  # GB of its process
    cpus: int | None = None  # that it and the processes it starts run on
    seconds: float | None = None  # of one task
    disk: float | None = None  # GB of states, answers and encoders in the kit

    def __post_init__(self) -> None:
        for name in ("memory", "cpus", "seconds", "disk"):
            value = getattr(self, name)
            if value is None:
                continue
            if not value > 0:
                raise ConfigError(f"limits.{name} is {value:g}; it must be above 0, or none")
            if name in ("memory", "cpus") and sys.platform != "linux":
                raise ConfigError(f"limits.{name} needs Linux: leave it out")
            if name == "seconds" and sys.platform == "win32":
                raise ConfigError("limits.seconds does not work on Windows: leave it out")


@dataclass(frozen=True)
class SiteSettings:
    """The settings of one server or client."""

    log: LogSettings = field(default_factory=LogSettings)
    metrics: MetricsSettings = field(default_factory=MetricsSettings)
    limits: LimitSettings = field(default_factory=LimitSettings)

    @classmethod
    def read(cls, folder: Path, *, limited: bool) -> SiteSettings:
        """The settings in a folder's `settings.yaml`; the defaults where there is none.

        Args:
            folder: of a federation, or a kit.
            limited: whether `limits` may be set: they are enforced at a client only.
        """
        path = folder / FILE
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return cls()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from None
        return cls.of(read_yaml(text, str(path), "settings"), str(path), limited=limited)

    @classmethod
    def of(cls, tree: Mapping[str, Any], name: str, *, limited: bool) -> SiteSettings:
        """The settings in a tree of plain values; `name` is that of their file, for messages."""
        sections: dict[str, type[Any]] = {"log": LogSettings, "metrics": MetricsSettings}
        sections |= {"limits": LimitSettings} if limited else {}
        chosen = {}
        for key, value in tree.items():
            if key == "limits" and not limited:
                raise UnknownSetting(
                    f"{name}: limits are for clients; limit a server by its systemd unit"
                )
            if key not in sections:
                raise UnknownSetting(f"{name} has the key {key!r}: {suggest(str(key), sections)}")
            try:
                chosen[key] = make(sections[key], {} if value is None else value, key)
            except ConfigError as error:
                raise type(error)(f"{name}: {error}") from None
        return cls(**chosen)


KEYS = tuple(
    f"{section}.{one.name}"
    for section, cls in (("log", LogSettings), ("metrics", MetricsSettings))
    for one in fields(cls)
) + tuple(f"limits.{one.name}" for one in fields(LimitSettings))
