"""The federation's folder at the server: its sites, its keys, and the kits for sites.

    federation.yaml            the list of sites; written last: with it, the federation exists
    .lock                      prevents two commands from changing it at once
    ca/ca.crt, ca.key          the federation's own certificate authority
    server/server.crt, .key    for TLS
    server/signing.key, .pub   the server signs asks with it
    sites/NAME.pub             the public key of each site
    kits/NAME/                 the kit for a site (`harmonium.sites.kit`), with site.key only if
                               the site did not make it itself

A site is identified by its key and by a number that is never reused. Private keys that others can
read are refused.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import filelock
import pydantic
from cryptography.hazmat.primitives.asymmetric import ec

from harmonium.core.errors import ConfigError, StoreError
from harmonium.core.files import write_atomic
from harmonium.core.paths import make_folder
from harmonium.sites import certificates
from harmonium.sites.kit import (
    NO_OTHER_KEYS,
    Fingerprint,
    Fingerprints,
    Hosts,
    Kit,
    KitFile,
    Number,
    Port,
    check_name,
    check_unique,
    dump,
    keygen,
    parse,
    read_pair,
    write_kit_file,
    write_pair,
    write_policy,
)
from harmonium.sites.upkeep import owner_only

__all__ = [
    "Federation",
    "Kit",
    "Member",
    "RegisteredSite",
    "add_site",
    "describe",
    "enrol",
    "init",
    "keygen",
    "read_members",
    "remove_site",
    "renew",
]
_SUBFOLDERS = ("ca", "server", "sites", "kits")


@dataclass(frozen=True)
class Member:
    """A site as federation.yaml lists it."""

    __pydantic_config__: ClassVar[Any] = NO_OTHER_KEYS
    number: Number  # never reused, even after this site has left
    name: str  # also of its kit and its key file
    fingerprint: Fingerprint  # SHA-256 of its public key
    own_key: bool  # the site made its key itself; otherwise the server made it


@dataclass(frozen=True)
class RegisteredSite(Member):
    """A member with its public key."""

    public_key: ec.EllipticCurvePublicKey = field(repr=False)  # its answers must be signed by it


AnyMember = TypeVar("AnyMember", bound=Member)


@dataclass(frozen=True)
class _FederationFile:
    """federation.yaml."""

    __pydantic_config__: ClassVar[Any] = NO_OTHER_KEYS
    format: Literal[1]  # of this file
    id: str  # of the federation, random
    hosts: Hosts  # where sites connect to the server
    port: Port  # the one port that is open
    certificate_days: Annotated[int, pydantic.Field(ge=1, le=3650)]  # of the server's next one
    sites: tuple[Member, ...] = ()  # in the order of their numbers
    removed: tuple[Member, ...] = ()  # their keys stay refused


@dataclass(frozen=True)
class Federation:
    """A federation whose folder was read and checked."""

    folder: Path
    id: str  # random, the same in every kit
    hosts: tuple[str, ...]  # where sites connect to the server
    port: int  # the one port that is open
    sites: tuple[RegisteredSite, ...]  # those that belong to it now, by number
    removed: tuple[Member, ...]  # those that have left
    notes: tuple[str, ...]  # what needs attention soon

    @property
    def authority(self) -> Path:
        """The certificate that the server's is signed by."""
        return self.folder / "ca" / "ca.crt"

    @property
    def certificate(self) -> Path:
        """The server's TLS certificate."""
        return self.folder / "server" / "server.crt"

    @property
    def certificate_key(self) -> Path:
        """The key of the server's TLS certificate."""
        return self.folder / "server" / "server.key"

    def signing_key(self) -> ec.EllipticCurvePrivateKey:
        """The key that asks are signed with."""
        return certificates.read_private_key(self.folder / "server" / "signing.key")

    def kit(self, name: str) -> Path:
        """The folder to hand to a site."""
        return self.folder / "kits" / _find(self.sites, name).name

    @classmethod
    def read(cls, folder: Path) -> Federation:
        """Read and check all files of a federation; an error names the first fault."""
        file = _read_file(folder)
        server, renewing = folder / "server", f"run harmonium server renew {folder}"
        remedy = "make a new federation and hand out new kits"
        authority, notes = certificates.read_certificate(folder / "ca" / "ca.crt", remedy)
        certificate, soon = certificates.read_certificate(server / "server.crt", renewing)
        if not certificates.issued_by(certificate, authority):
            raise StoreError(f"{server / 'server.crt'} is not signed by ca/ca.crt: {renewing}")
        read_pair(server / "server.key", certificate.public_key(), "server.crt", renewing)
        signing = certificates.read_public_key(server / "signing.pub")
        read_pair(server / "signing.key", signing, "signing.pub", "restore both from a backup")
        if (folder / "ca" / "ca.key").exists():  # may lie in a safe: only renewing needs it
            _read_authority_key(folder, authority.public_key())
        return cls(
            folder=folder,
            id=file.id,
            hosts=file.hosts,
            port=file.port,
            sites=tuple(_read_site(folder, member) for member in file.sites),
            removed=file.removed,
            notes=(*notes, *soon),
        )


def init(
    folder: Path, sites: Sequence[str], hosts: Sequence[str], port: int = 8443, days: int = 730
) -> Federation:
    """Make a federation; `sites` get keys made here, others are enrolled with keys of their own.

    `days` is how long the server's certificate is valid.
    """
    for place, name in enumerate(sites):
        check_name(name)
        check_unique(name, sites[:place])
    if not hosts:
        raise ConfigError(
            "no host is given: name one at which sites reach the server, e.g. --host fl.example.org"
        )
    if not 1 <= port <= 65535 or not 1 <= days <= 3650:
        raise ConfigError(f"port {port} and {days} days: use ports 1 to 65535, days 1 to 3650")
    names = tuple(dict.fromkeys(certificates.checked_host(host) for host in hosts))
    with owner_only():
        _must_be_empty(make_folder(folder))  # before a lock is put into somebody else's folder
    with _lock(folder):
        _must_be_empty(folder)
        try:
            _make(folder, _FederationFile(1, secrets.token_hex(16), names, port, days), sites)
        except BaseException:  # nothing was handed out, so nothing is lost
            for name in _SUBFOLDERS:
                shutil.rmtree(folder / name, ignore_errors=True)
            raise
    return Federation.read(folder)


def renew(folder: Path) -> Federation:
    """Make a new TLS certificate from the same authority, so no site has to do anything."""
    with _lock(folder):
        _write_certificate(folder, _read_file(folder))
    return Federation.read(folder)


def add_site(folder: Path, name: str) -> Federation:
    """Add a site with a key made here."""
    return _add(folder, name, None)


def enrol(folder: Path, name: str, public_key_file: Path) -> Federation:
    """Add a site by the public key that it made; its kit holds no secret."""
    return _add(folder, name, certificates.read_public_key(public_key_file))


def remove_site(folder: Path, name: str) -> Federation:
    """Remove a site: its key is refused from now on, and its number is never reused."""
    with _lock(folder):
        file = _read_file(folder)
        gone = _find(file.sites, name)
        staying = tuple(member for member in file.sites if member is not gone)
        _write_file(folder, replace(file, sites=staying, removed=(*file.removed, gone)))
        shutil.rmtree(folder / "kits" / gone.name, ignore_errors=True)
        (folder / "sites" / f"{gone.name}.pub").unlink(missing_ok=True)
    return Federation.read(folder)


def read_members(folder: Path) -> dict[str, int]:
    """The sites of a federation and their numbers, without a look at keys and certificates."""
    return {member.name: member.number for member in _read_file(folder).sites}


def describe(federation: Federation) -> list[dict[str, Any]]:
    """A row for each site that belongs, or once belonged, to the federation."""
    rows: list[tuple[Member, str]] = [(gone, "removed") for gone in federation.removed]
    rows += [(site, "own" if site.own_key else "handed out") for site in federation.sites]
    return [
        {"number": site.number, "site": site.name, "fingerprint": site.fingerprint, "key": key}
        for site, key in sorted(rows, key=lambda row: row[0].number)
    ]


def _make(folder: Path, file: _FederationFile, sites: Sequence[str]) -> None:
    """Write all files of a new federation."""
    for name in _SUBFOLDERS:
        (folder / name).mkdir(mode=0o700)
    authority, key = certificates.make_authority(file.id)
    write_atomic(folder / "ca" / "ca.key", certificates.private_pem(key), private=True)
    write_atomic(folder / "ca" / "ca.crt", certificates.certificate_pem(authority))
    _write_certificate(folder, file)
    write_pair(folder / "server" / "signing")
    for name in sites:
        file = _with_site(folder, file, name, None)
    _write_file(folder, file)


def _add(folder: Path, name: str, public: ec.EllipticCurvePublicKey | None) -> Federation:
    check_name(name)
    with _lock(folder):
        file = _read_file(folder)
        check_unique(name, (member.name for member in file.sites))
        for other in (*file.sites, *file.removed):
            if public is not None and other.fingerprint == certificates.fingerprint(public):
                raise ConfigError(f"this key is or was the key of {other.name}: make a new one")
        _write_file(folder, _with_site(folder, file, name, public))
    return Federation.read(folder)


def _with_site(
    folder: Path, file: _FederationFile, name: str, public: ec.EllipticCurvePublicKey | None
) -> _FederationFile:
    """Write a site's key and kit; return the federation.yaml to write, which makes it a member."""
    kit, own = folder / "kits" / name, public is not None
    shutil.rmtree(kit, ignore_errors=True)  # left by a kill: it may hold an older key
    kit.mkdir(mode=0o700)
    if public is None:
        public = write_pair(kit / "site")
        write_policy(kit)
    else:  # the site has a policy of its own beside its key
        write_atomic(kit / "site.pub", certificates.public_pem(public))
    write_atomic(folder / "sites" / f"{name}.pub", certificates.public_pem(public))
    authority, _ = certificates.read_certificate(folder / "ca" / "ca.crt", "make a new federation")
    server = certificates.read_public_key(folder / "server" / "signing.pub")
    write_atomic(kit / "ca.crt", certificates.certificate_pem(authority))
    write_atomic(kit / "server.pub", certificates.public_pem(server))
    number = 1 + max((member.number for member in (*file.sites, *file.removed)), default=-1)
    prints = Fingerprints.of(authority, server, public)
    write_kit_file(kit, KitFile(1, file.id, name, number, file.hosts, file.port, prints))
    return replace(file, sites=(*file.sites, Member(number, name, prints.site, own)))


def _write_certificate(folder: Path, file: _FederationFile) -> None:
    """Write a new TLS certificate and key; run again after a kill between the two files."""
    authority, _ = certificates.read_certificate(folder / "ca" / "ca.crt", "make a new federation")
    signer = _read_authority_key(folder, authority.public_key())
    certificate, key = certificates.make_server_certificate(
        authority, signer, file.hosts, file.certificate_days
    )
    write_atomic(folder / "server" / "server.key", certificates.private_pem(key), private=True)
    write_atomic(folder / "server" / "server.crt", certificates.certificate_pem(certificate))


def _read_authority_key(folder: Path, public: Any) -> ec.EllipticCurvePrivateKey:
    return read_pair(folder / "ca" / "ca.key", public, "ca.crt", "restore both from a backup")


def _read_file(folder: Path) -> _FederationFile:
    if not (folder / "federation.yaml").exists():
        raise StoreError(f"{folder} holds no federation: harmonium server init makes one")
    file = parse(_FederationFile, folder / "federation.yaml")
    everyone = (*file.sites, *file.removed)
    for place, member in enumerate(file.sites):
        check_name(member.name)
        check_unique(member.name, (other.name for other in file.sites[:place]))
    if len({member.number for member in everyone}) < len(everyone):
        raise StoreError(f"{folder / 'federation.yaml'} gives two sites the same number")
    return file


def _write_file(folder: Path, file: _FederationFile) -> None:
    head = "# Changed by harmonium server add, remove and renew; numbers are never reused.\n"
    write_atomic(folder / "federation.yaml", (head + dump(file)).encode())


def _read_site(folder: Path, member: Member) -> RegisteredSite:
    path = folder / "sites" / f"{member.name}.pub"
    public = certificates.read_public_key(path)
    if certificates.fingerprint(public) != member.fingerprint:
        raise StoreError(f"{path} is not the key that federation.yaml lists: restore it")
    return RegisteredSite(member.number, member.name, member.fingerprint, member.own_key, public)


def _find(members: Sequence[AnyMember], name: str) -> AnyMember:
    for member in members:
        if member.name == name:
            return member
    known = ", ".join(member.name for member in members) or "none"
    raise ConfigError(f"no site is called {ascii(name[:60])}: there are {known}")


def _must_be_empty(folder: Path) -> None:
    """Refuse a folder that is not empty."""
    names = sorted(path.name for path in folder.iterdir() if path.name != ".lock")
    if "federation.yaml" in names:
        raise ConfigError(
            f"{folder} holds a federation already: add sites with harmonium server add, or name "
            "a new folder"
        )
    if names and {*names} <= {*_SUBFOLDERS, "federation.yaml.part"}:
        raise ConfigError(
            f"{folder} has no federation.yaml: if an init was interrupted, remove the folder and "
            "try again; if the file was lost, restore it"
        )
    if names:
        raise ConfigError(f"{folder} is not empty ({names[0]}): name a new folder")


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Let one command at a time change a federation."""
    if not folder.is_dir():
        raise StoreError(f"{folder} is not a folder: harmonium server init makes a federation")
    lock = filelock.FileLock(folder / ".lock", mode=0o600)
    try:
        lock.acquire(timeout=10)
    except filelock.Timeout:
        raise StoreError(f"another command is changing {folder}: wait for it") from None
    except OSError as error:
        raise StoreError(f"cannot write to {folder}: {error.strerror}") from None
    try:
        with owner_only():
            yield
    finally:
        lock.release()
