"""Keys and certificates of a federation: creating, writing, reading and checking them.

All keys are on one curve, P-384. The federation has a certificate authority of its own, so no site
has to trust anybody else's.
"""

from __future__ import annotations

import ipaddress
import os
import re
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from harmonium.core.errors import ConfigError, StoreError
from harmonium.core.files import digest_of

WARNING_DAYS = 30  # a certificate that expires sooner is reported
_LABEL = re.compile(r"(?!-)[a-z0-9-]{1,63}(?<!-)", re.ASCII)
_HASH = hashes.SHA384()


def new_key() -> ec.EllipticCurvePrivateKey:
    """A fresh private key, from the operating system's randomness."""
    return ec.generate_private_key(ec.SECP384R1())


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A private key as PKCS8 text without a password; whoever writes it keeps it private."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def public_pem(key: ec.EllipticCurvePublicKey) -> bytes:
    """A public key as SubjectPublicKeyInfo text."""
    return key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def certificate_pem(certificate: x509.Certificate) -> bytes:
    """A certificate as text."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def fingerprint(thing: ec.EllipticCurvePublicKey | x509.Certificate) -> str:
    """SHA-256 of a public key's or a certificate's DER bytes, to compare over the telephone."""
    if isinstance(thing, x509.Certificate):
        return digest_of(thing.public_bytes(serialization.Encoding.DER))
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return digest_of(thing.public_bytes(serialization.Encoding.DER, form))


def checked_host(text: str) -> str:
    """A DNS name or an address at which sites connect; anything else is refused.

    >>> checked_host("FL.Example.org"), checked_host("::1")
    ('fl.example.org', '::1')
    """
    with suppress(ValueError):
        if "%" not in text:  # a zone means something on one machine only
            return str(ipaddress.ip_address(text))
    name = text.lower()
    labels = name.split(".")
    numeric = labels[
        -1
    ].isdigit()  # such a name could be read as an address, but is not a valid one
    if len(name) > 253 or numeric or not all(_LABEL.fullmatch(label) for label in labels):
        raise ConfigError(
            f"{ascii(text[:60])} is not a host: give a DNS name such as fl.example.org or an "
            "address such as 192.0.2.7, without a port"
        )
    return name


def make_authority(
    federation: str, days: int = 3650
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """A certificate authority that may sign server certificates and nothing below them."""
    key = new_key()
    name = _name(f"Harmonium federation {federation}")
    usage = _usage(key_cert_sign=True, crl_sign=True)
    builder = (
        _builder(name, name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
    )
    return builder.sign(key, _HASH), key


def make_server_certificate(
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    hosts: Iterable[str],
    days: int,
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """A TLS certificate for the hosts, and always for this machine itself, with a new key."""
    key = new_key()
    names = [_alternative(host) for host in dict.fromkeys([*hosts, "localhost", "127.0.0.1"])]
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    builder = (
        _builder(_name("Harmonium server"), authority.subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(issuer, critical=False)
    )
    return builder.sign(authority_key, _HASH), key


def read_private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """A private key that nobody but its owner can read."""
    data = read_bytes(path)
    if b"PUBLIC KEY" in data and b"PRIVATE KEY" not in data:
        raise StoreError(f"{path} is a public key: give the private key of the pair, e.g. site.key")
    mode = stat.S_IMODE(path.stat().st_mode)
    if os.name == "posix" and mode & 0o077:
        raise StoreError(f"{path} can be read by others (mode {mode:o}): run chmod 600 {path}")
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError):
        raise StoreError(f"{path} is not a private key in PEM without a password") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name != "secp384r1":
        raise StoreError(f"{path} is a key of another kind: it must be EC P-384")
    return key


def read_public_key(path: Path) -> ec.EllipticCurvePublicKey:
    """A public key; a private one in its place is refused by name."""
    data = read_bytes(path)
    if b"PRIVATE KEY" in data:
        raise StoreError(f"{path} is a private key, which must stay at its site: give site.pub")
    try:
        key = serialization.load_pem_public_key(data)
    except ValueError:
        raise StoreError(f"{path} is not a public key in PEM") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp384r1":
        raise StoreError(f"{path} is a key of another kind: it must be EC P-384")
    return key


def read_certificate(path: Path, remedy: str) -> tuple[x509.Certificate, list[str]]:
    """A certificate that is valid now, and a note if it soon will not be."""
    try:
        certificate = x509.load_pem_x509_certificate(read_bytes(path))
    except ValueError:
        raise StoreError(f"{path} is not a certificate in PEM") from None
    now, end = datetime.now(UTC), certificate.not_valid_after_utc
    if now >= end:
        raise StoreError(f"{path} expired on {end:%Y-%m-%d}: {remedy}")
    if now < certificate.not_valid_before_utc:
        raise StoreError(f"{path} is not valid yet: set this machine's clock")
    soon = end - now < timedelta(days=WARNING_DAYS)
    note = f"{path} expires on {end:%Y-%m-%d}, in {(end - now).days} days: {remedy}"
    return certificate, [note] if soon else []


def expiries(paths: Mapping[str, Path]) -> dict[str, float]:
    """When certificates expire or expired, in seconds since 1970; unreadable ones are left out."""
    ends = {}
    for name, path in paths.items():
        with suppress(OSError, ValueError):
            certificate = x509.load_pem_x509_certificate(path.read_bytes())
            ends[name] = certificate.not_valid_after_utc.timestamp()
    return ends


def issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Whether the authority signed the certificate."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def read_bytes(path: Path) -> bytes:
    """The bytes of a file that must be there."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from None


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    """The common part of all certificates; valid from an hour ago, for clocks that run late."""
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(
    *, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
