"""Privacy budgets: the cost of an ask, the clients that can afford it, and their releases."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch.nn.modules.batchnorm import _BatchNorm

from harmonium.core.errors import BudgetSpent, ConfigError
from harmonium.core.types import ClientId
from harmonium.federation.wire import Ask, changes_model
from harmonium.learning import dpsgd
from harmonium.learning.contract import called
from harmonium.privacy.account import Account
from harmonium.privacy.mechanisms import Release

if TYPE_CHECKING:
    from harmonium.federation.method import Method, Server


def costs(method: Method, step: str, examples: int) -> tuple[Release, ...]:
    """The releases of an ask for a step: those of the method, and noise on the model."""
    return (*method.costs(step, examples), *_of_model(method, step))


def paid_here(method: Method, step: str, examples: int) -> tuple[Release, ...]:
    """Those of the releases that the client itself makes, in order."""
    by_method = tuple(method.costs(step, examples))
    return by_method if _by_server(method) else costs(method, step, examples)


def paid_at_server(method: Method, step: str) -> list[Mapping[str, Any]]:
    """The ledger's records of noise that the server adds to the average."""
    if method.updates is None or not _by_server(method):
        return []
    return [{**one, "noise": method.updates.source} for one in records(_of_model(method, step))]


def _by_server(method: Method) -> bool:
    return method.updates is not None and method.updates.at_average


def _of_model(method: Method, step: str) -> tuple[Release, ...]:
    """Noise on a client's change of the model or in every step of its training; never both."""
    updates = method.updates.costs if method.updates is not None else ()
    if not (noisy := updates or dpsgd.costs(method.local)):
        return ()
    declared = method.exchanges().get(step)
    return noisy if declared is not None and changes_model(declared) else ()


def affordable(
    method: Method, server: Server, step: str, clients: Iterable[ClientId]
) -> list[ClientId]:
    """The clients whose privacy budget allows another ask for a step.

    The account records the others, so that the log can name them.
    """
    able = {client: _affords(method, server, step, client) for client in clients}
    if refused := {client for client, can in able.items() if not can}:
        server.account.refused.setdefault(step, set()).update(refused)
    return [client for client, can in able.items() if can]


def _affords(method: Method, server: Server, step: str, client: ClientId) -> bool:
    return server.account.affords(client, costs(method, step, server.examples[client]))


def check_ask(method: Method, server: Server, ask: Ask) -> None:
    """Refuse to ask a client for more than its privacy budget allows."""
    account = server.account
    for client in (one for one in ask.to if not _affords(method, server, ask.step, one)):
        spent = account.spent(client, costs(method, ask.step, server.examples[client]))
        raise BudgetSpent(
            f"with another `{ask.step}` client {client} would spend epsilon {spent:.4g} at delta "
            f"{account.delta:g}, more than privacy.epsilon={account.limit:g}"
        )


def check_budget(method: Method) -> None:
    """Refuse a privacy budget where nothing is released that could be counted."""
    guarded = {
        step: {name for name, one in declared.up.items() if one.guarded}
        for step, declared in method.exchanges().items()
    }
    if not any(guarded.values()) and not _by_server(method):
        raise ConfigError(
            f"privacy.epsilon has nothing to count: {called(method)} sends nothing with noise. "
            "Leave it out, or choose a method or settings with noise."
        )
    for step, names in guarded.items():
        if not names <= {one.field for one in costs(method, step, 1000)}:
            raise ConfigError(
                f"privacy.epsilon cannot be enforced: {called(method)} does not declare what "
                f"`{step}` releases. Its author must add that to `costs`."
            )


def check_noise(method: Method) -> None:
    """Refuse noisy values whose sensitivity to one image is larger than stated.

    The stated sensitivity of a guarded value holds if each row depends on one image and on what the
    server sent. What a client keeps from earlier training (`local` tensors, most often BatchNorm's
    statistics) depends on all of its images, and so does a BatchNorm that normalises by the batch
    even in evaluation mode. Noisy models are not checked here: the noise of `updates` is for the
    client as a whole, and `dpsgd.check` looks at single training steps.
    """
    guarded = _guarded_rows(method)
    if not guarded or not (reason := _shared_influence(method)):
        return
    for step, name in guarded:
        if {r.neighbours for r in method.costs(step, 1000) if r.field == name} != {"client"}:
            raise ConfigError(
                f"the noise on `{name}` of {called(method)} would be too small: {reason}"
            )


def _guarded_rows(method: Method) -> list[tuple[str, str]]:
    """Step and field of all that is sent with noise, except models."""
    declared = method.declared_exchanges()
    guards = any(field.guarded for one in declared.values() for field in one.up.values())
    if not guards and not any(method.costs(step, 1000) for step in declared):
        return []  # most methods: no model needs to be built to know it
    return [
        (step, name)
        for step, exchange in method.exchanges().items()
        for name, field in exchange.up.items()
        if field.guarded and not (name == "model" and changes_model(exchange))
    ]


def _shared_influence(method: Method) -> str:
    """Why features of an image depend on other images of its client, with a remedy; or empty."""
    parts = method.blueprint
    instead = "or choose norms without statistics (encoder.norm, objective.norm)"
    for key in (key for key, rule, _ in parts.tensors() if rule == "local"):
        if key in parts.exceptions:
            return (
                f"batch_norm={method.batch_norm} keeps {key}, which follows from all images of a "
                f"client and enters every row. Set batch_norm=average, {instead}."
            )
        return (
            f"part '{key.partition('.')[0]}' stays at a client and is trained on all of its "
            "images, so it would enter every row. Share it, or leave the noise out."
        )
    for path, module in parts.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            return (
                f"{path} normalises by the batch at hand, so an image moves the rows of others. "
                f"Build it with track_running_stats=True, {instead}."
            )
    return ""


def check_first(method: Method, account: Account, examples: Mapping[ClientId, int]) -> None:
    """Refuse a privacy budget with which no client can afford some step even once."""
    fresh = Account(account.limit, account.delta)
    for step in method.exchanges() if account.limit is not None else ():
        needed = {client: costs(method, step, count) for client, count in examples.items()}
        if any(fresh.affords(client, releases) for client, releases in needed.items()):
            continue
        least = min(fresh.spent(client, releases) for client, releases in needed.items())
        raise BudgetSpent(
            f"no client can afford even one `{step}`: it costs epsilon {least:.4g} or more at "
            f"delta {account.delta:g}, and privacy.epsilon={account.limit:g}"
        )


def recount(
    account: Account,
    method: Method,
    examples: Mapping[ClientId, int],
    entries: Iterable[Mapping[str, Any]],
) -> Account:
    """The account after charging all asks of a ledger, as the driver did."""
    for entry in entries:
        client = entry["client"]
        account.charge(client, costs(method, entry["step"], examples[client]))
    return account


def charged(
    ledger: Iterable[Mapping[str, Any]], asked: Iterable[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The entries of a ledger, and asks for noisy releases that are missing from it after a crash.

    `asked` is written before an ask is sent and is never truncated. An ask that was sent twice drew
    its noise twice, so it counts twice.
    """
    entries = list(ledger)
    recorded = Counter(_name(entry) for entry in entries)
    lost = Counter(_name(entry) for entry in asked) - recorded
    keys = ("round", "ask", "step", "client")
    more = [dict(zip(keys, name, strict=True), outcome="lost") for name in lost.elements()]
    return [*entries, *more]


def left_out(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[ClientId, int]]:
    """By step, who could not afford it and from which round on, from rows of metrics.jsonl."""
    since: dict[str, dict[ClientId, int]] = {}
    for row in rows:
        for step, clients in row.get("refused", {}).items():
            for client in clients:
                since.setdefault(step, {}).setdefault(client, row["round"])
    return since


def notes_on_noise(
    method: Method, account: Account, noise: str, examples: Mapping[ClientId, int]
) -> list[str]:
    """Notes for the user about a run whose clients add noise."""
    fewest = min(examples.values(), default=0)
    if not any(costs(method, step, max(fewest, 1)) for step in method.exchanges()):
        return []
    notes = [
        "noise comes from the operating system, so this run cannot be repeated bit by bit; use "
        "privacy.noise=simulated for studies"
        if noise == "system"
        else "noise follows from the seed: whoever knows the seed can subtract it, so it is for "
        "studies only and protects nobody"
    ]
    if fewest and account.delta >= 1 / fewest and account.limit is not None:
        notes.append(
            f"privacy.delta={account.delta:g} means little for a client with {fewest} examples: it "
            f"should be far below 1 / {fewest}"
        )
    return notes


def fault(promised: Sequence[Release], actual: Sequence[Mapping[str, Any]]) -> str:
    """How a client's releases differ from those its method promised; empty if they do not.

    >>> fault([Release("corr", "gaussian", 0.5, 2.0)], [])
    'released nothing, not corr by gaussian (sensitivity=0.5, scale=2, count=1)'
    """
    wanted = records(promised)
    if not wanted or len(wanted) == len(actual) and all(map(_same, wanted, actual)):
        return ""
    return f"released {_listed(actual)}, not {_listed(wanted)}"


def records(releases: Sequence[Release]) -> list[Mapping[str, Any]]:
    """Releases as ledger records, without the source of the noise, which only the client knows."""
    return [{k: v for k, v in asdict(one).items() if k != "noise"} for one in releases]


def in_words(releases: Mapping[str, int]) -> str:
    """Counts of releases, keyed `FIELD by MECHANISM`, in words."""
    by: dict[str, list[str]] = {}
    for what, count in releases.items():
        name, _, mechanism = what.rpartition(" by ")
        by.setdefault(name, []).append(f"{count} with {mechanism}")
    return "; ".join(f"{name}: {', '.join(some)} noise" for name, some in by.items())


def _name(entry: Mapping[str, Any]) -> tuple[int, int, str, ClientId]:
    return entry["round"], entry["ask"], entry["step"], entry["client"]


def _same(wanted: Mapping[str, Any], recorded: Mapping[str, Any]) -> bool:
    """Whether two records of a release agree, numbers up to rounding."""
    for key, value in wanted.items():
        actual = recorded.get(key)
        if isinstance(value, float) and isinstance(actual, float | int):
            if not math.isclose(value, actual, rel_tol=1e-9):
                return False
        elif value != actual:
            return False
    return True


def _listed(releases: Sequence[Mapping[str, Any]]) -> str:
    texts = []
    for release in releases:
        numbers = (f"{k}={v:g}" for k, v in release.items() if isinstance(v, float | int))
        texts.append(f"{release.get('field')} by {release.get('mechanism')} ({', '.join(numbers)})")
    return ", ".join(texts) or "nothing"
