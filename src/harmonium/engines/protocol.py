"""The protocol between a server and its sites, which both state in every message.

A server and a site work together if they speak the same protocol, whatever their versions. A plan
with settings that one of them does not know is refused all the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harmonium import __version__

PROTOCOL = 1  # raised by changes to messages that an earlier version could not answer correctly
FIRST = 1  # of versions that do not state theirs, up to 0.2.0
_VERSION = re.compile(r"[\w.+!-]{1,40}", re.ASCII)


@dataclass(frozen=True)
class Speaker:
    """What the sender of a message states of itself."""

    protocol: int = PROTOCOL
    version: str = __version__  # of Harmonium; empty: not stated
    time: float | None = None  # its clock, in seconds since 1970; none: not stated

    @classmethod
    def of(cls, about: Mapping[str, Any]) -> Speaker:
        """The speaker of a received message; whatever is not plausible counts as not stated.

        >>> Speaker.of({}).protocol, Speaker.of({"protocol": 2, "version": "0.9"}).version
        (1, '0.9')
        """
        protocol, version, time = (about.get(key) for key in ("protocol", "version", "time"))
        return cls(
            protocol if type(protocol) is int and 0 <= protocol < 2**31 else FIRST,
            version if isinstance(version, str) and _VERSION.fullmatch(version) else "",
            time if type(time) is float and 0 <= time < 2**40 else None,
        )

    def stated(self) -> dict[str, Any]:
        """The keys that go into a message."""
        about = {"protocol": self.protocol, "version": self.version, "time": self.time}
        return {key: value for key, value in about.items() if value is not None}

    def __str__(self) -> str:
        return f"Harmonium {self.version}" if self.version else "an earlier Harmonium"


def protocol_fault(server: Speaker, site: Speaker) -> str:
    """Why a server and a site cannot work together; empty if they can.

    >>> protocol_fault(Speaker(2, "0.4.0"), Speaker(1, "0.3.0"))  # doctest: +ELLIPSIS
    'the server is Harmonium 0.4.0 with protocol 2 and the site Harmonium 0.3.0 with protocol 1: ...
    """
    if server.protocol == site.protocol:
        return ""
    older = "site" if site.protocol < server.protocol else "server"
    return (
        f"the server is {server} with protocol {server.protocol} and the site {site} with protocol "
        f"{site.protocol}: upgrade the {older}"
    )


def version_hint(server: Speaker, site: Speaker) -> str:
    """What to add to a refusal that other versions may explain; empty if both are the same."""
    if server.version == site.version:
        return ""
    return f" (the server is {server}, the site {site}: see Upgrading in docs/federation.md)"
