"""The commands of a real federation: the server's, and those of a site."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harmonium.cli.federation_status import client_status, server_status
from harmonium.cli.plan import end_if_stopped, show_plan
from harmonium.cli.terminal import (
    Changes,
    Json,
    Out,
    err,
    say,
    say_prose,
    show_result,
    show_sites,
    show_table,
    watched,
)
from harmonium.core.errors import ConfigError, DataError, HarmoniumError
from harmonium.core.notes import Note

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

    from harmonium.core.callbacks import Callback
    from harmonium.sites.event_log import EventLog
    from harmonium.sites.folder import Federation
    from harmonium.sites.server import ListenSettings
    from harmonium.sites.upkeep import Removal

server = typer.Typer(
    suggest_commands=False,
    no_args_is_help=True,
    help="Set up a federation of real sites, and run recipes with them.",
)
client = typer.Typer(
    suggest_commands=False, no_args_is_help=True, help="Take part in a federation, at a site."
)

Folder = Annotated[Path, typer.Option("--federation", "-f", help="The federation's folder.")]
KitFolder = Annotated[Path, typer.Option("--kit", "-k", help="The kit, a folder from the server.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="No TLS; for trials, on loopback only.")]
Listen = Annotated[
    str | None,
    typer.Option(
        "--listen", metavar="HOST[:PORT]", help="Where to listen; all addresses if not given."
    ),
]
Wait = Annotated[
    float | None,
    typer.Option("--wait", help="Seconds after which to begin without sites that are offline."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would be deleted.")]
LogLevel = Annotated[
    str | None,
    typer.Option("--log-level", help="Log lines at this level: error, warning, info or debug."),
]
LogJson = Annotated[bool, typer.Option("--log-json", help="Log one JSON document a line.")]
FOLDER, KIT = Path("federation"), Path("kit")
server.command("status")(server_status)
client.command("status")(client_status)


# ---- the server ----------------------------------------------------------------------------------


@server.command("init")
def init(
    sites: Annotated[list[str] | None, typer.Argument(metavar="[SITE]...")] = None,
    folder: Folder = FOLDER,
    host: Annotated[
        list[str] | None,
        typer.Option("--host", help="Name or address at which sites reach the server."),
    ] = None,
    port: Annotated[int, typer.Option("--port", help="The one port that is open.")] = 8443,
    days: Annotated[
        int, typer.Option("--days", help="How long the server's certificate is valid.")
    ] = 730,
) -> None:
    """Make a federation: keys, certificates and a kit for each site.

    For example: harmonium server init north south west --host fed.example.org
    """
    from harmonium.sites.folder import init

    _show(init(folder, sites or [], host or ["localhost"], port, days))
    if not host:
        say_prose("note: sites reach the server at localhost; use --host for another address")


@server.command("add")
def add(
    name: str,
    folder: Folder = FOLDER,
    key: Annotated[
        Path | None, typer.Option("--key", help="The site.pub that the site made with keygen.")
    ] = None,
) -> None:
    """Add a site, with the key that it made (--key) or with a new key made here."""
    from harmonium.sites.folder import add_site, enrol

    _show(add_site(folder, name) if key is None else enrol(folder, name, key))


@server.command("remove")
def remove(name: str, folder: Folder = FOLDER) -> None:
    """Remove a site; the server refuses its key from the next start on."""
    from harmonium.sites.folder import remove_site

    _show(remove_site(folder, name))


@server.command("renew")
def renew(folder: Folder = FOLDER) -> None:
    """Renew the server's certificate; sites need not do anything."""
    from harmonium.sites.folder import renew

    _show(renew(folder))


@server.command("list")
def sites(folder: Folder = FOLDER, as_json: Json = False) -> None:
    """List the sites of a federation."""
    from harmonium.sites.folder import Federation, describe

    federation = Federation.read(folder)
    if as_json:
        print(json.dumps(describe(federation)))
        return
    _show(federation)


def _show(federation: Federation) -> None:
    from harmonium.sites.certificates import fingerprint, read_certificate
    from harmonium.sites.folder import describe

    say(f"folder    {federation.folder}")
    say(f"address   {', '.join(federation.hosts)}, port {federation.port}")
    authority, _ = read_certificate(federation.authority, "")
    shown, _ = read_certificate(federation.certificate, "")
    say(f"authority {fingerprint(authority)}, {_valid(authority)}")
    say(f"server    {fingerprint(federation.signing_key().public_key())}")
    say(f"TLS       {fingerprint(shown)}, {_valid(shown)}")
    if not federation.sites:
        say("next      add sites: harmonium server add NAME --key site.pub")
    rows = [{**row, "fingerprint": row["fingerprint"][:16]} for row in describe(federation)]
    show_table(rows, f"Sites of {federation.folder}")
    for site in federation.sites:
        kit = federation.kit(site.name)
        secret = "" if site.own_key else "; it holds a secret key: transfer it safely"
        say(f"kit       {kit}{secret}")
    for note in federation.notes:
        say_prose(f"note: {note}")


def _valid(certificate: Certificate) -> str:
    first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return f"valid from {first:%Y-%m-%d} to {last:%Y-%m-%d}"


@server.command("clean")
def clean_server(
    runs: Annotated[list[Path] | None, typer.Argument(metavar="[RUN]...")] = None,
    folder: Folder = FOLDER,
    dry_run: DryRun = False,
) -> None:
    """Delete messages of an earlier server process, and old commits of complete runs."""
    from harmonium.sites.folder import Federation
    from harmonium.sites.upkeep import removable_at_server

    _clean(removable_at_server(Federation.read(folder).folder, *(runs or [])), dry_run)


def _clean(removals: list[Removal], dry_run: bool) -> None:
    from harmonium.report.run_progress import size_of
    from harmonium.sites.upkeep import remove

    for removal in removals:
        say(f"{removal.what:<14} {size_of(removal.size):>9}  {removal.path}")
    if not dry_run:
        remove(removals)
    words = "would be deleted" if dry_run else "deleted"
    size = size_of(sum(removal.size for removal in removals))
    say(f"{size} {words}" if removals else "nothing to delete")


@server.command("start")
def start(
    what: Annotated[str, typer.Argument(metavar="METHOD_OR_FILE")],
    changes: Changes = None,
    folder: Folder = FOLDER,
    where: Out = None,
    listen: Listen = None,
    wait: Wait = None,
    insecure: Insecure = False,
    as_json: Json = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan, its digest and cost, and stop.")
    ] = False,
    log_level: LogLevel = None,
    log_json: LogJson = False,
) -> None:
    """Run a method or a recipe file with the sites of a federation.

    The server needs no images. If the recipe names a data set, the server evaluates with it.

    For example: harmonium server start fedavg rounds=50 data.size=64 --out runs/first
    """
    from harmonium.report.display import long_work

    with long_work(err, as_json, "loading"):
        from harmonium.sites.plan import federated, planned
        from harmonium.sites.server import start

        recipe, listening = federated(what, changes or []), _listening(listen, wait, insecure)
    if dry_run:
        from harmonium.runs.plan import plan_of
        from harmonium.sites.folder import Federation

        plan, _ = planned(recipe, len(Federation.read(folder).sites))
        with long_work(err, as_json, "estimating"):
            found = plan_of(plan, out=where, sites=True)
        if as_json:
            shown = {"recipe": plan.tree(), "digest": plan.digest, "plan": found.plain()}
            print(json.dumps(shown))
        else:
            say(f"{plan.yaml()}# plan {plan.digest}")
            show_plan(found, err)
        end_if_stopped(found)
        return
    _obey_sigterm()
    with (
        _logged(folder, "server", log_level, log_json, silent=as_json) as log,
        watched(as_json, "harmonium server resume", _follower(log)) as watcher,
    ):
        result = start(recipe, folder, out=where, watcher=watcher, listening=listening)
    show_result(result, as_json)


@server.command("resume")
def resume(
    run: Path,
    changes: Changes = None,
    listen: Listen = None,
    insecure: Insecure = False,
    as_json: Json = False,
    log_level: LogLevel = None,
    log_json: LogJson = False,
) -> None:
    """Continue a federation's run that stopped; rounds=N trains it further."""
    from harmonium.report.display import long_work

    with long_work(err, as_json, "loading"):
        from harmonium.sites.server import folder_of, resume

        listening, folder = _listening(listen, None, insecure), folder_of(run)
    _obey_sigterm()
    with (
        _logged(folder, "server", log_level, log_json, silent=as_json) as log,
        watched(as_json, "harmonium server resume", _follower(log)) as watcher,
    ):
        result = resume(run, *(changes or []), watcher=watcher, listening=listening)
    show_result(result, as_json)


@server.command("eval")
def evaluate(
    run: Path,
    changes: Changes = None,
    where: Annotated[Path | None, typer.Option("--out", help="The folder for the files.")] = None,
    listen: Listen = None,
    insecure: Insecure = False,
    as_json: Json = False,
) -> None:
    """Ask the sites of a run to test its encoder on their own labelled images, by counts.

    For example: harmonium server eval runs/first evaluate.sites=probe
    """
    from harmonium.report.display import long_work

    with long_work(err, as_json, "loading"):
        from harmonium.core.callbacks import Callback
        from harmonium.report.run_progress import watcher_for
        from harmonium.sites.evaluation import evaluate_at_sites

        listening = _listening(listen, None, insecure)
        watcher = Callback() if as_json else watcher_for(err)
    _obey_sigterm()
    with long_work(err, as_json, "asking the sites"):
        how: dict[str, Any] = {"out": where, "watcher": watcher, "listening": listening}
        result = evaluate_at_sites(run, *(changes or []), **how)
    if as_json:
        print(json.dumps({"folder": str(result.folder), "sites": dict(result.figures)}))
        return
    show_sites(result.figures)
    say(f"figures  {result.folder / 'sites.json'}")


@contextmanager
def _logged(
    folder: Path,
    who: str,
    level: str | None,
    as_json: bool,
    *,
    silent: bool = False,
    data: str | None = None,
) -> Iterator[EventLog | None]:
    """The log of a server or client; none where a terminal shows what happens instead.

    Options take precedence over `settings.yaml`. A failure is logged in place of the usual line,
    above debug without names of files. `data` is where a client's images are.
    """
    from harmonium.core.progress import send_events_to
    from harmonium.core.settings import make
    from harmonium.sites.event_log import EventLog
    from harmonium.sites.settings import LogSettings, SiteSettings

    settings = SiteSettings.read(folder, limited=data is not None).log
    chosen = {**asdict(settings), **({"level": level} if level else {})}
    settings = make(LogSettings, {**chosen, "json": as_json or settings.json}, "log")
    named = level is not None or as_json or settings.file is not None
    if not named and (silent or err.is_terminal):
        yield None
        return
    log = EventLog(settings, folder, who)
    try:
        with send_events_to(log.listener()):
            yield log
    except HarmoniumError as error:
        names_files = isinstance(error, DataError) or bool(data) and str(data) in str(error)
        hidden = names_files and settings.level != "debug"
        words = "the images cannot be used: --log-level debug, or a terminal, shows why"
        log.write("error", "failed", words if hidden else str(error))
        sys.exit(2)
    except KeyboardInterrupt:
        log.write("info", "stopped", "stopped")
        sys.exit(130)
    finally:
        log.close()


def _follower(log: EventLog | None) -> Callback | None:
    """What logs a run, if there is a log."""
    from harmonium.sites.event_log import LogWatcher

    return None if log is None else LogWatcher(log)


def _listening(listen: str | None, wait: float | None, insecure: bool) -> ListenSettings:
    from harmonium.sites.server import ListenSettings

    if wait is not None and not wait >= 0:
        raise ConfigError(f"--wait is {wait}; it must be 0 or more")
    default = "127.0.0.1" if insecure else "0.0.0.0"
    host, port = _address(listen) if listen else (default, None)
    return ListenSettings(host, port, insecure, wait)


def _address(text: str) -> tuple[str, int | None]:
    """`host`, `host:port` or `[address]:port`."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, ""
    if port and not (port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(f"'{text}' is not an address: write HOST:PORT, e.g. 127.0.0.1:8443")
    return host.strip("[]"), int(port) if port else None


# ---- a site --------------------------------------------------------------------------------------


@client.command("keygen")
def keygen(folder: Annotated[Path, typer.Argument()] = KIT) -> None:
    """Make this site's key pair; the server adds the site with its public half."""
    from harmonium.sites.certificates import fingerprint, read_public_key
    from harmonium.sites.kit import keygen

    public = keygen(folder)
    say(f"key      {fingerprint(read_public_key(public))}; compare it with the server's")
    say(f"send     {public} to the server, which runs: harmonium server add NAME --key site.pub")
    say(f"keep     {folder / 'site.key'}: it never leaves this site")
    say(f"then     put the files that the server sends back into {folder}")


@client.command("start")
def start_client(
    data: Annotated[
        str, typer.Option("--data", help="The images: folder:PATH, npz:FILE, csv:FILE or a name.")
    ],
    changes: Changes = None,
    kit: KitFolder = KIT,
    address: Annotated[
        str | None,
        typer.Option(
            "--server",
            metavar="HOST:PORT",
            help="Address of the server; that of the kit if not given.",
        ),
    ] = None,
    part: Annotated[
        str,
        typer.Option(
            "--part", metavar="K/N", help="Only every N-th image, from the K-th on; for trials."
        ),
    ] = "",
    once: Annotated[bool, typer.Option("--once", help="Stop when a run has finished.")] = False,
    insecure: Insecure = False,
    keep_days: Annotated[
        float | None,
        typer.Option("--keep-days", help="Delete answers and states of runs older than this."),
    ] = None,
    device: Annotated[
        str, typer.Option("--device", help="Where to compute: auto, cpu, cuda, cuda:1 or mps.")
    ] = "auto",
    log_level: LogLevel = None,
    log_json: LogJson = False,
) -> None:
    """Take part in runs with the images of this site.

    For example: harmonium client start --data folder:/data/scans
    """
    from harmonium.report.display import long_work

    with long_work(err, command="loading"):
        from harmonium.sites.client import SiteImages, check_place, run_client, site_device
        from harmonium.sites.kit import Kit

        opened = Kit.read(kit)
        site_device(device)  # refused before an image is read
        check_place(data)  # outside the log, which hides what may name images
    if address is not None:
        host, port = _address(address)
        address = f"{f'[{host}]' if ':' in host else host}:{port or opened.port}"
    _obey_sigterm()
    place = data.partition(":")[2] or data
    with _logged(kit, opened.name, log_level, log_json, data=place) as log:

        def note(text: str) -> None:
            say_prose(f"{opened.name}: {text}", err) if log is None else log.note(text)

        for text in opened.notes:
            note(Note(text, "warning"))
        with long_work(err, log is not None, "reading the images"):
            images = SiteImages.parse(data, changes or [], part)
        with long_work(err, log is not None):
            more: dict[str, Any] = {"address": address, "insecure": insecure, "once": once}
            run_client(opened, images, note, keep_days=keep_days, device=device, **more)


@client.command("check")
def check(
    what: Annotated[str, typer.Argument(metavar="METHOD_OR_FILE")],
    changes: Changes = None,
    kit: KitFolder = KIT,
    images: Annotated[
        int | None,
        typer.Option(
            "--images", help="Number of images at this site; that of the last run if not given."
        ),
    ] = None,
) -> None:
    """Check a plan against this site's policy, and show what it would add to the budget spent.

    The command does not connect to the server and reads no image.

    For example: harmonium client check fedavg local.epochs=5 clients=3
    """
    from harmonium.report.display import long_work

    with long_work(err, command="checking the plan"):
        from harmonium.sites.client import KEPT, describe_budget
        from harmonium.sites.kit import Kit
        from harmonium.sites.log import SiteLog, last_image_count
        from harmonium.sites.plan import federated, frame_of, method_of, planned
        from harmonium.sites.policy import Policy

        opened, recipe = Kit.read(kit), federated(what, changes or [])
        policy, (plan, _) = Policy.read(opened.policy), planned(recipe, recipe.clients)
        site_log = SiteLog(opened.folder / KEPT / "log.jsonl")
        known = images if images is not None else last_image_count(site_log.entries())
        policy.check_plan(policy.open_plan(json.loads(frame_of(plan))), method_of(plan), known)
        budget = describe_budget(policy, plan, site_log.releases(), known)
    if budget:
        say(f"budget   {budget}")
    if known is None:
        say_prose(
            "note: `pictures`, `batch` and `steps` of the policy were not checked, because the "
            "number of images is not known before a run: give it with --images N"
        )
    if why := policy.evaluation_refusal(plan):
        say_prose(f"note: this site will send no counts for evaluation, and will train: {why}")
    if not any(change.partition("=")[0].strip() == "clients" for change in changes or []):
        say_prose(
            f"note: clients={plan.clients} is assumed, from the recipe; the digest depends on it, "
            "so give clients=N with the number of sites in the federation"
        )
    say(f"{opened.name} accepts the plan, for {plan.clients} sites: plan {plan.digest}")


@client.command("clean")
def clean_client(
    days: Annotated[
        float,
        typer.Option("--days", help="Only of runs in which nothing was written for this long."),
    ] = 30.0,
    kit: KitFolder = KIT,
    dry_run: DryRun = False,
) -> None:
    """Delete answers and states of earlier runs; encoders and the log stay.

    A run whose states are gone can no longer be resumed with this site's states.
    """
    from harmonium.sites.kit import Kit
    from harmonium.sites.upkeep import removable_at_site

    _clean(removable_at_site(Kit.read(kit).folder / "kept", days), dry_run)


@client.command("log")
def log(kit: KitFolder = KIT, as_json: Json = False) -> None:
    """Show what the server asked of this site, and what the site sent."""
    from harmonium.report.display import long_work

    with long_work(err, as_json, "reading the log"):
        from harmonium.report.run_progress import size_of
        from harmonium.sites.client import KEPT
        from harmonium.sites.kit import Kit
        from harmonium.sites.log import SiteLog, table, totals
        from harmonium.sites.policy import Policy

        opened = Kit.read(kit)
        site_log = SiteLog(opened.folder / KEPT / "log.jsonl")
        entries = site_log.entries()
        summed: dict[str, Any] = totals(entries, Policy.read(opened.policy).delta)
    if as_json:
        head = site_log.head()._asdict()
        print(json.dumps({"entries": entries, "totals": summed, "head": head}))
        return
    rows = [{**row, "run": (row["run"] or "")[:8]} for row in table(entries)]
    show_table(rows, f"Asks to {opened.name}, and what left")
    sizes = ", ".join(f"{size_of(count)} of {kind}" for kind, count in summed["bytes"].items())
    say(f"in all   {summed['answers']} answers: {sizes or 'nothing'}")
    if again := summed["again"]:
        say(
            f"of these {size_of(again)} sent again after a lost answer; the server counts them once"
        )
    if apart := summed["measuring"]:
        say(
            f"of these {size_of(apart)} for measuring; the server does not count them in its rounds"
        )
    if summed["releases"]:
        spent = f"epsilon {summed['epsilon']:.4g} at delta {summed['delta']:g}"
        say(f"guarded  {summed['releases']} releases: {spent}")
    say(f"head     {site_log.head().number} {site_log.head().sha256}; the chain is intact")


def _obey_sigterm() -> None:
    """Handle SIGTERM, which a service manager sends, as Ctrl-C.

    It also works where Ctrl-C is ignored, as in what a shell script starts with `&`.
    """

    def end(*_: object) -> None:
        if signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None):
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGTERM, end)
