"""Seals: whatever is changed, swapped or forged is refused in one line, and nothing crashes."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from harmonium.core.errors import LONGEST, WireError, one_line
from harmonium.core.files import digest_of
from harmonium.engines import seal as seals
from harmonium.engines.seal import LARGEST, must_match, nonce, seal, unseal

KEY, OTHER = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
BODIES = [b"the plan", b"the frame", b""]


def header(**changes: Any) -> dict[str, Any]:
    about = {"federation": "f", "site": 3, "run": "r", "plan": "p", "round": 4, "ask": 1}
    return {**about, "step": "train", "client": 2, "nonce": nonce(), **changes}


def sealed(way: Any = "ask", about: Any = None, bodies: Any = BODIES, key: Any = KEY) -> bytes:
    return seal(way, about or header(), [digest_of(body) for body in bodies], key)


def signed(text: str, way: str = "answer", key: Any = KEY) -> bytes:
    """A seal over any text at all, as only the owner of the key can make it."""
    signature = key.sign(seals._signed(way, text), seals._HASH).hex()  # type: ignore[arg-type]
    return json.dumps({"header": text, "signature": signature}).encode()


def refused(
    match: str, envelope: bytes, bodies: list[bytes] = BODIES, way: Any = "ask", key: Any = KEY
) -> None:
    with pytest.raises(WireError, match=match) as error:
        unseal(way, envelope, bodies, key.public_key())
    assert "\n" not in str(error.value) and len(str(error.value)) < 200


def test_a_seal_gives_back_its_header_and_carries_any_number_of_bodies() -> None:
    for bodies in ([], [b""], BODIES, [bytes(1 << 16)] * 3):
        about = header()
        assert unseal("ask", sealed(about=about, bodies=bodies), bodies, KEY.public_key()) == about


@pytest.mark.parametrize("field", sorted(header()))
def test_no_field_of_a_header_can_be_changed(field: str) -> None:
    held = json.loads(sealed())
    about = json.loads(held["header"])
    for value in ("another", 5, None, [about[field]]):
        text = json.dumps({**about, field: value}, sort_keys=True, separators=(",", ":"))
        refused("not signed by", json.dumps({**held, "header": text}).encode())
    less = json.dumps({key: value for key, value in about.items() if key != field})
    refused("not signed by", json.dumps({**held, "header": less}).encode())


def test_a_header_that_means_the_same_but_is_written_otherwise_is_no_longer_signed() -> None:
    held = json.loads(sealed())
    spaced = json.dumps(json.loads(held["header"]))
    refused("not signed by", json.dumps({**held, "header": spaced}).encode())
    refused("not signed by", json.dumps({**held, "header": held["header"] + " "}).encode())


def test_any_changed_byte_of_a_seal_or_a_body_is_refused() -> None:
    about, random = header(), Random(7)
    for number, part in enumerate([sealed(about=about), *BODIES[:2]]):
        for place in range(len(part)):
            parts = [sealed(about=about), *BODIES] if number else [part, *BODIES]
            changed = bytearray(part)
            changed[place] ^= 1 << random.randrange(8)
            parts[number] = bytes(changed)
            try:
                got = unseal("ask", parts[0], parts[1:], KEY.public_key())
            except WireError as error:
                assert "\n" not in str(error)
            else:  # a hexadecimal digit of the signature, now in upper case
                assert got == about and changed.lower() == part.lower()


@pytest.mark.parametrize(
    "bodies",
    [
        [b"the plan", b"the frame"],
        [*BODIES, b""],
        [BODIES[1], BODIES[0], BODIES[2]],
        [b"the plan", b"the frame", b"x"],
        [b"the planthe frame", b"", b""],
        [],
    ],
)
def test_other_bodies_than_those_signed_are_refused(bodies: list[bytes]) -> None:
    refused("was changed", sealed(), bodies)


def test_only_the_right_signer_counts_and_an_ask_is_no_answer() -> None:
    refused("the ask is not signed by", sealed(key=OTHER))
    refused("the answer is not signed by", sealed("ask"), way="answer")
    refused("the ask is not signed by", sealed("answer"))
    plain = json.loads(sealed())
    refused("cannot be read", json.dumps({**plain, "signature": ""}).encode()[:-2])
    refused("not signed", json.dumps({**plain, "signature": ""}).encode())
    refused("not signed", json.dumps({**plain, "signature": "00" * 5000}).encode())


def test_a_signature_of_the_bare_header_does_not_count() -> None:
    """Flower signs with the same key; what it signs must never be an answer of ours."""
    text = json.loads(sealed())["header"]
    signature = KEY.sign(text.encode(), seals._HASH).hex()
    refused("not signed", json.dumps({"header": text, "signature": signature}).encode())


@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"null",
        b"3",
        b'"text"',
        b"[]",
        b"[[]]",
        b"{}",
        b'{"header": "{}"}',
        b'{"signature": "00"}',
        b'{"header": {}, "signature": "00"}',
        b'{"header": "{}", "signature": 5}',
        b'{"header": "{}", "signature": "no hexadecimal"}',
        b'{"header": "\\ud800", "signature": "00"}',
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"header":' * 20_000,
        b"9" * 5_000,
        b"NaN",
    ],
)
def test_junk_is_no_seal(junk: bytes) -> None:
    refused("cannot be read|not signed", junk)


@pytest.mark.parametrize(
    "text",
    ["3", '"text"', "null", "[]", "true", "{}", "[" * 50_000, "", "{", '{"bodies": 3}', "9" * 5000],
)
def test_junk_that_its_owner_signed_is_refused_as_well(text: str) -> None:
    """A site may sign anything, and the server must not stumble over it."""
    refused("cannot be read|was changed", signed(text), way="answer")


def test_a_seal_that_is_too_large_is_not_even_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    large = sealed(about=header(step="x" * LARGEST))
    monkeypatch.setattr(json, "loads", lambda *_: pytest.fail("it was parsed"))
    refused("seal of the ask has \d+ bytes", large)


def test_what_is_not_signed_is_not_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies may be large: a stranger must not make anyone work."""
    envelope = sealed(key=OTHER)
    monkeypatch.setattr(seals, "digest_of", lambda body: pytest.fail("it was hashed"))
    refused("not signed", envelope)


def test_a_header_of_no_numbers_is_never_sealed() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        sealed(about=header(round=float("nan")))


@pytest.mark.parametrize("field", sorted(header()))
def test_an_answer_to_another_ask_does_not_match(field: str) -> None:
    ask = header()
    must_match({**ask, "more": 1}, ask)
    changes: list[Callable[[dict[str, Any]], Any]] = [
        lambda about: about.update({field: "another"}),
        lambda about: about.update({field: None}),
        lambda about: about.pop(field),
    ]
    for change in changes:
        answer = dict(ask)
        change(answer)
        with pytest.raises(WireError, match=f"for another {field}.*another ask"):
            must_match(answer, ask)


def test_nonces_do_not_repeat() -> None:
    drawn = {nonce() for _ in range(2000)}
    assert len(drawn) == 2000 and {len(one) for one in drawn} == {32}


def test_a_stranger_s_words_become_one_harmless_line() -> None:
    assert one_line("one\n  two\tthree ") == "one two three"
    assert one_line("\x1b[2Jgone\x07 \u202eevil\x00") == "?[2Jgone? ?evil?"
    long = one_line("x" * 10 * LONGEST)
    assert len(long) == LONGEST + 3 and long.endswith("...")
    assert one_line(WireError("é")) == "é"


def test_an_envelope_is_written_in_one_way() -> None:
    """Whatever byte is changed, also one that reads alike, the envelope is refused."""
    key = ec.generate_private_key(ec.SECP384R1())
    sealed = seal("answer", {"round": 1}, [digest_of(b"body")], key)
    signature = json.loads(sealed)["signature"].encode()
    assert unseal("answer", sealed, [b"body"], key.public_key()) == {"round": 1}
    for same in (sealed.replace(signature, signature.upper()), sealed + b" ", b" " + sealed):
        with pytest.raises(WireError, match="cannot be read"):
            unseal("answer", same, [b"body"], key.public_key())
