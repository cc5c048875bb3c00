import os
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from harmonium.cli.federation import _obey_sigterm, check, sites
from harmonium.core.errors import ConfigError, HarmoniumError, PolicyRefusal, StoreError
from harmonium.sites import certificates as made
from harmonium.sites.folder import (
    Federation,
    Kit,
    add_site,
    describe,
    enrol,
    init,
    keygen,
    remove_site,
    renew,
)

SITES = ("north", "south", "west")
HOSTS = ("fl.example.org", "192.0.2.7", "2001:db8::7")
HOSTILE_NAMES = (
    *("", ".", "..", "../x", "a/b", "a\\b", "/a", "a b", "a.b", "a\n", "a\x00", "-rf", "_a", "$x"),
    *("nörth", "ｎorth", "\u202enorth", "north\u200b", "n٣", "n" * 41),
    *("CON", "nul", "Com1", "LPT9", "aux"),
)
HOSTILE_HOSTS = (
    *("", "a b", "a:1", "https://a", "*.a", "-a", "a..b", "a/b", "ü.de", "1.2.3", "fe80::1%1"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return init(tmp_path / "federation", SITES, HOSTS).folder


def files(folder: Path) -> dict[str, bytes]:
    held = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in held}


def edit(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    tree = yaml.safe_load(path.read_text())
    change(tree)
    path.write_text(yaml.safe_dump(tree))


def greet(federation: Federation, host: str, authority: Path) -> bytes:
    """What a client hears that trusts the authority and believes to have dialled the host."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(federation.certificate, federation.certificate_key)
    client = ssl.create_default_context(cafile=str(authority))
    client.verify_flags |= ssl.VERIFY_X509_STRICT  # as newer Pythons have it
    listening = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        with listening, listening.accept()[0] as raw:
            try:
                with server.wrap_socket(raw, server_side=True) as secure:
                    secure.sendall(b"hello")
            except OSError:  # the client hung up
                pass

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        raw = socket.create_connection(listening.getsockname(), timeout=10)
        with raw, client.wrap_socket(raw, server_hostname=host) as secure:
            return secure.recv(5)
    finally:
        thread.join(10)


def test_a_federation_and_its_kits_are_read_back(folder: Path) -> None:
    federation = Federation.read(folder)
    assert (federation.hosts, federation.port, federation.notes) == (HOSTS, 8443, ())
    assert [(site.number, site.name) for site in federation.sites] == [*enumerate(SITES)]
    assert len(federation.id) == 32 and federation != init(folder.parent / "other", SITES, HOSTS)
    for site in federation.sites:
        kit = Kit.read(federation.kit(site.name))
        assert (kit.federation, kit.name, kit.number) == (federation.id, site.name, site.number)
        assert (kit.hosts, kit.port, kit.notes) == (HOSTS, 8443, ())
        assert kit.private_key.public_key() == site.public_key
        assert kit.fingerprints.site == site.fingerprint == made.fingerprint(site.public_key)
        assert kit.server_key == federation.signing_key().public_key()
        assert kit.authority.read_bytes() == federation.authority.read_bytes()
        assert kit.policy.exists()
    assert len({site.fingerprint for site in federation.sites}) == 3
    assert "PRIVATE" not in repr(Kit.read(federation.kit("north")))


def test_every_private_key_is_its_owners_alone(folder: Path) -> None:
    held = {name for name, data in files(folder).items() if b"PRIVATE KEY" in data}
    kits = {f"kits/{name}/site.key" for name in SITES}
    assert held == {"ca/ca.key", "server/server.key", "server/signing.key"} | kits
    for name in held:
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
        assert stat.S_IMODE((folder / name).parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("host", [*HOSTS, "localhost", "127.0.0.1"])
def test_sites_accept_the_certificate_for_each_host(folder: Path, host: str) -> None:
    federation = Federation.read(folder)
    assert greet(federation, host, Kit.read(federation.kit("west")).authority) == b"hello"


def test_sites_refuse_another_authority_and_another_host(folder: Path) -> None:
    federation = Federation.read(folder)
    other = init(folder.parent / "other", SITES, HOSTS)
    with pytest.raises(ssl.SSLCertVerificationError):
        greet(federation, "fl.example.org", other.authority)
    for host in ("example.org", "x.fl.example.org", "192.0.2.8", "fl.example.com"):
        with pytest.raises(ssl.SSLCertVerificationError, match="mismatch|not valid for"):
            greet(federation, host, federation.authority)


def test_the_authority_cannot_be_used_for_more_authorities(folder: Path) -> None:
    certificate, _ = made.read_certificate(folder / "ca" / "ca.crt", "")
    assert "ca=True, path_length=0" in str(certificate.extensions)
    certificate, _ = made.read_certificate(folder / "server" / "server.crt", "")
    assert "ca=False" in str(certificate.extensions)
    assert "serverAuth" in str(certificate.extensions)


def test_a_site_that_makes_its_own_key_is_handed_no_secret(folder: Path, tmp_path: Path) -> None:
    sent = keygen(tmp_path / "site")
    secret = (tmp_path / "site" / "site.key").read_bytes()
    assert stat.S_IMODE((tmp_path / "site" / "site.key").stat().st_mode) == 0o600
    left = folder / "kits" / "east"  # as a kill may leave it
    left.mkdir()
    (left / "site.key").write_bytes(secret)
    federation = enrol(folder, "east", sent)
    kit = federation.kit("east")
    assert all(b"PRIVATE" not in data for data in files(kit).values())
    assert secret not in files(folder).values()
    with pytest.raises(StoreError, match="no site.key"):
        Kit.read(kit)
    for name, data in files(kit).items():
        (tmp_path / "site" / name).write_bytes(data)
    assert Kit.read(tmp_path / "site").number == 3
    assert describe(federation)[3]["key"] == "own" and describe(federation)[0]["key"] != "own"
    with pytest.raises(ConfigError, match="already"):
        keygen(tmp_path / "site")


def test_a_key_is_enrolled_once_and_only_its_public_half(folder: Path, tmp_path: Path) -> None:
    before = files(folder)
    for name in ("north", "south"):
        with pytest.raises(ConfigError, match=f"was the key of {name}"):
            enrol(folder, "east", folder / "sites" / f"{name}.pub")
    sent = keygen(tmp_path / "site")
    with pytest.raises(StoreError, match="private key"):
        enrol(folder, "east", sent.with_name("site.key"))
    sent.write_bytes(b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n")
    with pytest.raises(StoreError, match="not a public key"):
        enrol(folder, "east", sent)
    with pytest.raises(StoreError, match="cannot read"):
        enrol(folder, "east", tmp_path / "missing.pub")
    assert files(folder) == before


def test_other_kinds_of_keys_are_refused(folder: Path, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec

    weak = ec.generate_private_key(ec.SECP256R1())
    (tmp_path / "weak.pub").write_bytes(made.public_pem(weak.public_key()))
    with pytest.raises(StoreError, match="P-384"):
        enrol(folder, "east", tmp_path / "weak.pub")
    (folder / "kits" / "north" / "site.key").write_bytes(made.private_pem(weak))
    with pytest.raises(StoreError, match="P-384"):
        Kit.read(folder / "kits" / "north")


def test_a_removed_sites_number_and_key_are_gone_for_ever(folder: Path, tmp_path: Path) -> None:
    key = tmp_path / "west.pub"
    key.write_bytes((folder / "sites" / "west.pub").read_bytes())
    federation = remove_site(folder, "west")
    assert [site.name for site in federation.sites] == ["north", "south"]
    assert not [name for name in files(folder) if "west" in name]
    with pytest.raises(ConfigError, match="key of west"):
        enrol(folder, "west", key)
    with pytest.raises(ConfigError, match="'west'.*north, south"):
        remove_site(folder, "west")
    federation = add_site(folder, "west")  # the same people, with a new key
    assert [(site.number, site.name) for site in federation.sites][2] == (3, "west")
    assert federation.sites[2].fingerprint != federation.removed[0].fingerprint
    rows = describe(remove_site(folder, "west"))
    assert [(row["number"], row["key"]) for row in rows][2:] == [(2, "removed"), (3, "removed")]
    assert add_site(folder, "east").sites[2].number == 4


def test_renewing_keeps_the_authority(folder: Path) -> None:
    before = files(folder)
    federation = renew(folder)
    changed = {name for name, data in files(folder).items() if before[name] != data}
    assert changed == {"server/server.crt", "server/server.key"}
    kit = Kit.read(federation.kit("north"))
    assert greet(federation, "fl.example.org", kit.authority) == b"hello"


def test_a_renewal_that_was_killed_is_named_and_mended(folder: Path) -> None:
    old = (folder / "server" / "server.crt").read_bytes()
    renew(folder)
    (folder / "server" / "server.crt").write_bytes(old)
    with pytest.raises(StoreError, match="server.crt.*harmonium server renew"):
        Federation.read(folder)
    assert renew(folder).sites


def test_the_authoritys_key_may_lie_in_a_safe(folder: Path) -> None:
    (folder / "ca" / "ca.key").rename(folder.parent / "ca.key")
    assert add_site(folder, "east").sites[3].name == "east"
    with pytest.raises(StoreError, match="cannot read .*ca.key"):
        renew(folder)


def test_certificates_that_expire_are_told_of(folder: Path, tmp_path: Path) -> None:
    soon = init(tmp_path / "soon", SITES, HOSTS, days=12)
    (note,) = soon.notes
    assert "in 11 days" in note and "harmonium server renew" in note
    authority, _ = made.read_certificate(folder / "ca" / "ca.crt", "")
    key = made.read_private_key(folder / "ca" / "ca.key")
    certificate, own = made.make_server_certificate(authority, key, HOSTS, 0)
    (folder / "server" / "server.crt").write_bytes(made.certificate_pem(certificate))
    (folder / "server" / "server.key").write_bytes(made.private_pem(own))
    with pytest.raises(StoreError, match="expired on .* harmonium server renew"):
        Federation.read(folder)
    assert renew(folder).notes == ()


@pytest.mark.skipif(os.name != "posix", reason="permissions are of POSIX systems")
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_keys_that_others_can_read_are_refused(folder: Path, mode: int) -> None:
    for name in ("ca/ca.key", "server/server.key", "server/signing.key"):
        (folder / name).chmod(mode)
        with pytest.raises(StoreError, match=f"chmod 600 {folder / name}"):
            Federation.read(folder)
        (folder / name).chmod(0o400)
        Federation.read(folder)
    (folder / "kits" / "north" / "site.key").chmod(mode)
    with pytest.raises(StoreError, match="chmod 600"):
        Kit.read(folder / "kits" / "north")


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_hostile_names_are_refused_in_one_line(folder: Path, name: str) -> None:
    before = files(folder.parent)
    refusals = (
        lambda: init(folder.parent / "other", ["good", name], HOSTS),
        lambda: add_site(folder, name),
        lambda: enrol(folder, name, folder / "sites" / "north.pub"),
        lambda: remove_site(folder, name),
    )
    for refused in refusals:
        with pytest.raises(ConfigError) as caught:
            refused()
        assert "\n" not in str(caught.value) and str(caught.value).isascii()
    assert files(folder.parent) == before


def test_names_in_files_are_not_trusted(folder: Path) -> None:
    kit = folder / "kits" / "north"
    edit(kit / "kit.yaml", lambda tree: tree.update(name="../x"))
    with pytest.raises(HarmoniumError, match="cannot be a site's name"):
        Kit.read(kit)
    edit(folder / "federation.yaml", lambda tree: tree["sites"][0].update(name="../x"))
    with pytest.raises(HarmoniumError, match="cannot be a site's name"):
        Federation.read(folder)


def test_names_differ_by_more_than_case(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="north already.*NORTH"):
        add_site(folder, "NORTH")
    with pytest.raises(ConfigError, match="south already.*South"):
        init(tmp_path / "other", ["south", "South"], HOSTS)
    longest = init(tmp_path / "other", ["n" * 40, "0", "yes", "12e3", "null"], HOSTS)
    assert [site.name for site in longest.sites][1:] == ["0", "yes", "12e3", "null"]


@pytest.mark.parametrize("host", HOSTILE_HOSTS)
def test_hostile_hosts_are_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigError, match="is not a host"):
        init(tmp_path / "federation", SITES, [host])
    assert not (tmp_path / "federation").exists()


def test_ports_and_no_hosts_are_refused(tmp_path: Path) -> None:
    for port in (0, 65536, -1):
        with pytest.raises(ConfigError, match="65535"):
            init(tmp_path / "federation", SITES, HOSTS, port)
    with pytest.raises(ConfigError, match="--host"):
        init(tmp_path / "federation", SITES, [])


def test_init_never_touches_what_is_there(folder: Path, tmp_path: Path) -> None:
    before = files(folder)
    with pytest.raises(ConfigError, match="harmonium server add"):
        init(folder, SITES, HOSTS)
    assert files(folder) == before
    other = tmp_path / "papers"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="not empty"):
        init(other, SITES, HOSTS)
    assert files(other) == {"thesis.txt": b"years of work"}
    with pytest.raises(StoreError, match="cannot create"):
        init(other / "thesis.txt", SITES, HOSTS)
    (tmp_path / "empty").mkdir()
    assert init(tmp_path / "empty", SITES, HOSTS).sites


KILLED = """
import os, pathlib, signal, sys
from harmonium.core import files
from harmonium.sites import folder, kit
whole = files.write_atomic
folder.init(pathlib.Path(sys.argv[1]) / "whole", ["north"], ["localhost"])  # imports all it needs
for last in range(14):
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        continue
    left = [last]
    def write(*given, **how):
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return whole(*given, **how)
    folder.write_atomic = kit.write_atomic = write
    folder.init(pathlib.Path(sys.argv[1]) / str(last), ["north"], ["localhost"])
"""


@pytest.mark.skipif(os.name != "posix", reason="processes are killed as POSIX does")
def test_a_killed_init_leaves_nothing_that_passes_for_a_federation(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=True)
    for writes in range(14):
        folder = tmp_path / str(writes)
        assert len(files(folder)) == writes + 1  # and the lock
        with pytest.raises(StoreError, match="holds no federation"):
            Federation.read(folder)
        (folder / "federation.yaml.part").touch()
        with pytest.raises(ConfigError, match="remove the folder"):
            init(folder, ["north"], ["localhost"])


def test_an_init_that_fails_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("harmonium.sites.folder._write_file", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            init(tmp_path / "federation", SITES, HOSTS)
    assert b"PRIVATE" not in b"".join(files(tmp_path).values())
    assert init(tmp_path / "federation", SITES, HOSTS).sites


def test_files_of_other_federations_are_noticed(folder: Path, tmp_path: Path) -> None:
    other = init(tmp_path / "other", SITES, HOSTS).folder
    for name, why in {
        "ca/ca.crt": "not signed by ca/ca.crt",
        "ca/ca.key": "not the key of ca.crt",
        "server/server.crt": "not signed by ca/ca.crt",
        "server/server.key": "not the key of server.crt",
        "server/signing.key": "not the key of signing.pub",
        "server/signing.pub": "not the key of signing.pub",
        "sites/north.pub": "not the key that federation.yaml lists",
    }.items():
        right = (folder / name).read_bytes()
        faults = ((other / name).read_bytes(), why), (b"?", "is not a"), (None, "read")
        for wrong, words in faults:
            (folder / name).write_bytes(wrong) if wrong else (folder / name).unlink()
            if (wrong, name) != (None, "ca/ca.key"):
                with pytest.raises(StoreError, match=words) as caught:
                    Federation.read(folder)
                assert "\n" not in str(caught.value)
        (folder / name).write_bytes(right)
        (folder / name).chmod(0o600)
    Federation.read(folder)


def test_files_of_other_kits_are_noticed(folder: Path, tmp_path: Path) -> None:
    kit = folder / "kits" / "north"
    other = init(tmp_path / "other", SITES, HOSTS).folder / "kits" / "north"
    for name in ("ca.crt", "server.pub", "site.pub", "site.key"):
        right = (kit / name).read_bytes()
        for wrong in ((other / name).read_bytes(), b"?", None):
            (kit / name).write_bytes(wrong) if wrong else (kit / name).unlink()
            with pytest.raises(StoreError):
                Kit.read(kit)
        (kit / name).write_bytes(right)
        (kit / name).chmod(0o600)
    Kit.read(kit)
    with pytest.raises(StoreError, match="no kit"):
        Kit.read(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: tree.update(port=70000),
        lambda tree: tree.update(hosts=[]),
        lambda tree: tree.update(hosts=["a b"]),
        lambda tree: tree.update(format=2),
        lambda tree: tree.update(extra=1),
        lambda tree: tree.pop("id", None) or tree.pop("federation"),
    ],
)
def test_sheets_are_checked(folder: Path, change: Callable[[dict[str, object]], object]) -> None:
    for path, read in (
        (folder / "federation.yaml", lambda: Federation.read(folder)),
        (folder / "kits" / "north" / "kit.yaml", lambda: Kit.read(folder / "kits" / "north")),
    ):
        edit(path, change)
        with pytest.raises(StoreError, match=path.name) as caught:
            read()
        assert "\n" not in str(caught.value)
        path.write_text("{[")
        with pytest.raises(StoreError, match=f"{path.name} is not YAML"):
            read()


def test_a_number_cannot_belong_to_two(folder: Path) -> None:
    remove_site(folder, "south")
    edit(folder / "federation.yaml", lambda tree: tree["sites"][0].update(number=1))
    with pytest.raises(StoreError, match="same number"):
        Federation.read(folder)


def test_commands_at_once_lose_no_site(folder: Path) -> None:
    threads = [threading.Thread(target=add_site, args=(folder, f"more{i}")) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [site.number for site in Federation.read(folder).sites] == [*range(9)]


def test_what_is_no_federation_is_said_so(tmp_path: Path) -> None:
    for command in (Federation.read, renew, lambda path: add_site(path, "east")):
        for path in (tmp_path, tmp_path / "missing"):
            with pytest.raises(StoreError, match="harmonium server init"):
                command(path)


def test_the_list_of_sites_says_until_when_certificates_are_valid(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sites(folder, as_json=False)
    told = capsys.readouterr().out
    for name, file in (("authority", "authority"), ("TLS", "certificate")):
        shown, _ = made.read_certificate(getattr(Federation.read(folder), file), "")
        last = f"{shown.not_valid_after_utc:%Y-%m-%d}"
        (line,) = [line for line in told.splitlines() if line.startswith(name)]
        assert line.endswith(f"to {last}") and made.fingerprint(shown) in line


def test_a_plan_is_checked_for_the_images_that_are_here(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One epoch of a batch of 64 over 60 images is one step, which the policy refuses."""
    words = ["local.epochs=1", "local.batch=64", "data.size=8", "data.channels=1", "clients=3"]
    kit = Federation.read(folder).kit(SITES[0])
    check("fedavg", words, kit=kit)
    shown = " ".join(capsys.readouterr().out.split())
    assert all(name in shown for name in ("`pictures`", "`batch`", "`steps`", "--images N"))
    with pytest.raises(PolicyRefusal, match="weights of 1 step.*`steps` is 2"):
        check("fedavg", words, kit=kit, images=60)
    check("fedavg", words, kit=kit, images=600)
    said = capsys.readouterr().out
    assert "--images" not in said and "assumed" not in said
    check("fedavg", words[:-1], kit=kit, images=600)
    assert "clients=10 is assumed" in " ".join(capsys.readouterr().out.split())


def test_a_service_ends_when_it_is_told_to_also_where_ctrl_c_is_ignored() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    try:
        for way in (signal.SIG_IGN, signal.default_int_handler):
            signal.signal(signal.SIGINT, way)
            _obey_sigterm()
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])
