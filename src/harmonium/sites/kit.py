"""A site's kit: the files with which it takes part in one federation.

kit.yaml      which federation and site, where the server is, fingerprints of the files below
ca.crt        the server's certificate must be signed by it
server.pub    asks must be signed by its owner
site.key      the site's private key; signs answers
site.pub      its public half, which the server knows
policy.yaml   what the site accepts; the site's own to edit
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import pydantic
import yaml
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from harmonium.core.errors import ConfigError, StoreError
from harmonium.core.files import write_atomic
from harmonium.core.paths import make_folder
from harmonium.sites import certificates
from harmonium.sites.upkeep import owner_only

T = TypeVar("T")
Fingerprint = Annotated[str, pydantic.Field(pattern="^[0-9a-f]{64}$")]
Number = Annotated[int, pydantic.Field(ge=0)]
Port = Annotated[int, pydantic.Field(ge=1, le=65535)]
HostName = Annotated[str, pydantic.AfterValidator(certificates.checked_host)]
Hosts = Annotated[tuple[HostName, ...], pydantic.Field(min_length=1)]
NO_OTHER_KEYS: Any = pydantic.ConfigDict(extra="forbid")  # unknown keys of a file are refused
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
_DEVICE = re.compile(r"(?i)con|prn|aux|nul|com[0-9]|lpt[0-9]")  # reserved names on Windows


@dataclass(frozen=True)
class Fingerprints:
    """SHA-256 fingerprints of the other files of a kit."""

    __pydantic_config__: ClassVar[Any] = NO_OTHER_KEYS
    authority: Fingerprint  # of ca.crt
    server: Fingerprint  # of server.pub
    site: Fingerprint  # of site.pub

    @classmethod
    def of(
        cls,
        authority: x509.Certificate,
        server: ec.EllipticCurvePublicKey,
        site: ec.EllipticCurvePublicKey,
    ) -> Fingerprints:
        """Fingerprints of a certificate and two keys."""
        return cls(
            certificates.fingerprint(authority),
            certificates.fingerprint(server),
            certificates.fingerprint(site),
        )


@dataclass(frozen=True)
class KitFile:
    """kit.yaml."""

    __pydantic_config__: ClassVar[Any] = NO_OTHER_KEYS
    format: Literal[1]  # of this file
    federation: str  # its id
    name: str  # the site's
    number: Number  # the site's
    hosts: Hosts  # where to connect to the server
    port: Port  # of the server
    fingerprints: Fingerprints  # of the files beside this one


@dataclass(frozen=True)
class Kit:
    """A kit whose files were read and checked."""

    folder: Path
    federation: str  # its id
    name: str  # the site's
    number: int  # the site's
    hosts: tuple[str, ...]  # where to connect to the server
    port: int  # of the server
    fingerprints: Fingerprints  # to compare with the server's over the telephone
    private_key: ec.EllipticCurvePrivateKey = field(repr=False)  # signs answers
    server_key: ec.EllipticCurvePublicKey = field(repr=False)  # asks must be signed by it
    notes: tuple[str, ...] = ()  # what needs attention soon

    @property
    def authority(self) -> Path:
        """The certificate that the server's must be signed by."""
        return self.folder / "ca.crt"

    @property
    def policy(self) -> Path:
        """The file of the site's policy."""
        return self.folder / "policy.yaml"

    @classmethod
    def read(cls, folder: Path) -> Kit:
        """Read and check all files of a kit; an error names the first fault."""
        file = read_kit_file(folder)
        remedy = "the server's operator must make a new federation and new kits"
        authority, notes = certificates.read_certificate(folder / "ca.crt", remedy)
        server = certificates.read_public_key(folder / "server.pub")
        public = certificates.read_public_key(folder / "site.pub")
        expected = file.fingerprints
        actual = Fingerprints.of(authority, server, public)
        for part, name in (("authority", "ca.crt"), ("server", "server.pub"), ("site", "site.pub")):
            if getattr(actual, part) != getattr(expected, part):
                raise StoreError(f"{folder / name} does not belong to this kit: get the kit again")
        if not (folder / "site.key").exists():
            raise StoreError(f"{folder} has no site.key: copy the one that keygen made there")
        key = read_pair(folder / "site.key", public, "site.pub", "use the key this kit is for")
        return cls(
            folder=folder,
            federation=file.federation,
            name=file.name,
            number=file.number,
            hosts=file.hosts,
            port=file.port,
            fingerprints=expected,
            private_key=key,
            server_key=server,
            notes=tuple(notes),
        )


def read_kit_file(folder: Path) -> KitFile:
    """kit.yaml, without a look at keys and certificates."""
    if not folder.is_dir():
        raise StoreError(
            f"there is no folder {folder}: name the kit, which has kit.yaml, by --kit PATH "
            "(harmonium client status PATH)"
        )
    if not (folder / "kit.yaml").exists():
        raise StoreError(
            f"{folder} is not a kit: it has no kit.yaml; ask the server's operator for a kit"
        )
    file = parse(KitFile, folder / "kit.yaml")
    check_name(file.name)
    return file


def keygen(folder: Path) -> Path:
    """Make site.key, which stays at the site, and site.pub for the server; return its path."""
    with owner_only():
        make_folder(folder)
        for name in ("site.key", "site.pub", "kit.yaml"):
            if (folder / name).exists():
                raise ConfigError(f"{folder} already holds {name}: use another folder")
        write_pair(folder / "site")
        if not (folder / "policy.yaml").exists():
            write_policy(folder)
    return folder / "site.pub"


def write_policy(folder: Path) -> None:
    """Write the default policy of a site."""
    from harmonium.sites.policy import TEMPLATE  # imports torch, which keys do not need

    write_atomic(folder / "policy.yaml", TEMPLATE.encode())


def write_kit_file(folder: Path, file: KitFile) -> None:
    """Write kit.yaml."""
    head = f"# Kit of the site {file.name}. site.key never leaves it; policy.yaml is its own.\n"
    write_atomic(folder / "kit.yaml", (head + dump(file)).encode())


def write_pair(stem: Path) -> ec.EllipticCurvePublicKey:
    """Make a key and write `stem`.key and `stem`.pub."""
    key = certificates.new_key()
    write_atomic(stem.with_name(f"{stem.name}.key"), certificates.private_pem(key), private=True)
    write_atomic(stem.with_name(f"{stem.name}.pub"), certificates.public_pem(key.public_key()))
    return key.public_key()


def read_pair(path: Path, public: Any, other: str, remedy: str) -> ec.EllipticCurvePrivateKey:
    """A private key, which must belong to a public one."""
    key = certificates.read_private_key(path)
    if key.public_key() != public:
        raise StoreError(f"{path} is not the key of {other}: {remedy}")
    return key


def check_name(name: str) -> None:
    """Refuse a site's name that is not a valid file name on every system.

    >>> check_name("north-2")
    """
    if not _NAME.fullmatch(name) or _DEVICE.fullmatch(name):
        raise ConfigError(
            f"{ascii(name[:60])} cannot be a site's name: use 1 to 40 letters, digits, - and _, "
            "beginning with a letter or digit, and no name of a Windows device"
        )


def check_unique(name: str, others: Iterable[str]) -> None:
    """Refuse a name that differs from another at most in upper and lower case."""
    for other in others:
        if other.lower() == name.lower():
            raise ConfigError(f"there is a site {other} already: give {name} another name")


def parse(cls: type[T], path: Path) -> T:
    """A YAML file as a dataclass; an error names its first fault."""
    try:
        tree = yaml.safe_load(certificates.read_bytes(path).decode())
        return pydantic.TypeAdapter(cls).validate_python(tree)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError):
        raise StoreError(f"{path} is not YAML in UTF-8") from None
    except ConfigError as error:
        raise StoreError(f"{path}: {error}") from None
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(step) for step in first["loc"])
        raise StoreError(f"{path}: {where or 'all of it'}: {first['msg'].lower()}") from None


def dump(value: Any) -> str:
    """A dataclass of plain values as YAML."""
    return yaml.safe_dump(_plain(asdict(value)), sort_keys=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value
