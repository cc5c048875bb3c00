"""Metrics of a running server or client in Prometheus's text form, served over HTTP.

They are counted since the process started. Labels are names of sites, outcomes and kinds of values;
no metric names a path, an image or a patient.
"""

from __future__ import annotations

import math
import shutil
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any, Literal

from harmonium.core.errors import EngineError, HarmoniumError
from harmonium.privacy.budget import epsilon
from harmonium.sites.log import SiteLog
from harmonium.sites.policy import Policy
from harmonium.sites.settings import MetricsSettings

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PATH = "/metrics"
Labels = Mapping[str, str]


@dataclass
class Metric:
    """A metric and its samples."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    samples: list[tuple[Labels, float]] = field(default_factory=list)

    def add(self, value: float | None, **labels: str) -> Metric:
        """Add a sample; none is left out."""
        if value is not None:
            self.samples.append((labels, float(value)))
        return self


def rendered(metrics: Iterable[Metric]) -> str:
    r"""Metrics as text; those without samples are left out.

    >>> print(rendered([Metric("a_total", "counter", "Asks.").add(3, site="north")]), end="")
    # HELP a_total Asks.
    # TYPE a_total counter
    a_total{site="north"} 3
    """
    lines = []
    for one in metrics:
        if one.samples:
            lines += [f"# HELP {one.name} {one.help}", f"# TYPE {one.name} {one.kind}"]
        for labels, value in one.samples:
            inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
            lines.append(f"{one.name}{f'{{{inside}}}' if inside else ''} {_number(value)}")
    return "".join(f"{line}\n" for line in lines)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{value:+}".replace("inf", "Inf")
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)


def of_server(facts: Mapping[str, Any]) -> list[Metric]:
    """Metrics of a server's activity."""
    run, sites = facts["run"] or {}, facts["sites"]
    joined = [name for name, site in sites.items() if site["joined"]]
    asks = Metric("harmonium_site_asks_total", "counter", "Asks to a site, by outcome.")
    online = Metric("harmonium_site_connected", "gauge", "Whether a site is connected.")
    answer = Metric(
        "harmonium_site_last_answer_timestamp_seconds", "gauge", "When a site last answered."
    )
    clock = Metric(
        "harmonium_site_clock_offset_seconds", "gauge", "A site's clock minus the server's."
    )
    for name, site in sites.items():
        for outcome in ("answered", "refused", "declined"):
            asks.add(site[outcome], site=name, outcome=outcome)
        online.add(site["online"], site=name)
        answer.add(site["answer"], site=name)
        clock.add(site["clock"], site=name)
    return [
        *_of_both(facts),
        Metric("harmonium_sites", "gauge", "Sites of the federation.").add(len(sites)),
        Metric("harmonium_sites_joined", "gauge", "Sites in the run.").add(len(joined)),
        Metric("harmonium_rounds", "gauge", "Rounds of the run.").add(run.get("rounds")),
        Metric("harmonium_round", "gauge", "Last committed round.").add(run.get("round")),
        Metric(
            "harmonium_round_timestamp_seconds", "gauge", "When a round was last committed."
        ).add(run.get("committed")),
        Metric("harmonium_round_seconds", "gauge", "Seconds of the last round.").add(
            run.get("seconds")
        ),
        Metric("harmonium_loss", "gauge", "Mean loss of the last round.").add(run.get("loss")),
        *(
            Metric(f"harmonium_{verb}_bytes_total", "counter", f"Bytes {what} sites.").add(
                facts["bytes"][way]
            )
            for verb, what, way in (
                ("sent", "sent to", "down"),
                ("received", "received from", "up"),
            )
        ),
        *(asks, online, answer, clock),
    ]


def of_client(facts: Mapping[str, Any]) -> list[Metric]:
    """Metrics of a client's activity."""
    asks = Metric("harmonium_asks_total", "counter", "Asks of the server, by outcome.")
    for outcome, count in facts["asks"].items():
        asks.add(count, outcome=outcome)
    sent = Metric("harmonium_sent_bytes_total", "counter", "Bytes of values sent, by kind.")
    for kind, size in facts["sent"].items():
        sent.add(size, kind=kind)
    data, budget = facts["data"], facts.get("budget") or {}
    return [
        *_of_both(facts),
        Metric("harmonium_connected", "gauge", "Whether the server is reached.").add(
            facts["connected"]
        ),
        Metric("harmonium_contact_timestamp_seconds", "gauge", "When the server last spoke.").add(
            facts["contact"]
        ),
        Metric("harmonium_images", "gauge", "Images to take part with.").add(data.get("images")),
        Metric("harmonium_images_unreadable", "gauge", "Images that cannot be read.").add(
            data.get("unreadable")
        ),
        Metric("harmonium_received_bytes_total", "counter", "Bytes of values received.").add(
            facts["received"]
        ),
        Metric("harmonium_ask_seconds_total", "counter", "Seconds spent on asks.").add(
            facts["seconds"]
        ),
        Metric("harmonium_epsilon_spent", "gauge", "Epsilon of all noisy releases.").add(
            budget.get("spent")
        ),
        Metric("harmonium_epsilon_limit", "gauge", "Epsilon that the policy allows.").add(
            budget.get("limit")
        ),
        *(asks, sent),
    ]


def _of_both(facts: Mapping[str, Any]) -> list[Metric]:
    expiry = Metric(
        "harmonium_certificate_expiry_timestamp_seconds", "gauge", "When a certificate expires."
    )
    for name, end in facts.get("certificates", {}).items():
        expiry.add(end, certificate=name)
    versions = {"version": facts["version"], "protocol": str(facts["protocol"])}
    return [
        Metric("harmonium_info", "gauge", "Version of Harmonium.").add(1, **versions),
        Metric("harmonium_start_timestamp_seconds", "gauge", "When the process started.").add(
            facts["started"]
        ),
        Metric("harmonium_disk_free_bytes", "gauge", "Free bytes of the folder's disk.").add(
            facts.get("free")
        ),
        expiry,
    ]


def with_disk(facts: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The facts of an activity with the free bytes of the disk that a folder is on."""
    with suppress(OSError):
        return {**facts, "free": shutil.disk_usage(folder).free}
    return dict(facts)


class BudgetReader:
    """The privacy budget of a site, read again when its log has new releases."""

    def __init__(self, log: Path, policy: Path) -> None:
        """Of the site with this log and policy."""
        self._log, self._policy = SiteLog(log), policy
        self._lock = threading.Lock()
        self._known: tuple[int, float, float] | None = None  # releases, delta, their epsilon

    def read(self) -> dict[str, float | None]:
        """Epsilon `spent` and its `limit`; empty while log or policy cannot be read."""
        try:
            with self._lock:
                policy, releases = Policy.read(self._policy), self._log.releases()
                if self._known is None or self._known[:2] != (len(releases), policy.delta):
                    spent = epsilon(releases, policy.delta, neighbours="replace")
                    self._known = len(releases), policy.delta, spent
                return {"spent": self._known[2], "limit": policy.epsilon}
        except HarmoniumError:
            return {}


@contextmanager
def served(settings: MetricsSettings, text: Callable[[], str]) -> Iterator[None]:
    """Serve metrics at `/metrics` inside the block, if a port is set.

    Args:
        settings: address and port.
        text: returns the metrics; called at every request, in another thread.
    """
    if settings.port is None:
        yield
        return
    try:
        server = _Server((settings.address, settings.port), _handler(text))
    except OSError as error:
        raise EngineError(
            f"cannot serve metrics at {settings.address}:{settings.port}: {error.strerror}. Set "
            "another metrics.port"
        ) from None
    thread = threading.Thread(target=server.serve_forever, name="harmonium-metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that break off."""


def _handler(text: Callable[[], str]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10.0  # seconds for a request
        server_version = "harmonium"
        sys_version = ""

        def do_GET(self) -> None:  # noqa: N802  (the name that http.server calls)
            found = self.path == PATH
            body = text().encode() if found else b"metrics are at /metrics\n"
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", CONTENT_TYPE if found else "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Requests are not logged."""

    return Handler
