"""Certificates: who may read the keys, renewing, revoking, and what is refused."""

from __future__ import annotations

import stat
from datetime import timedelta
from pathlib import Path

import pytest

from offbeat.errors import ConfigError, OffbeatError, StorageError
from offbeat.live import certificates, transport


def states(folder: Path) -> dict[str, str]:
    return {one.name: "revoked" if one.revoked else "good" for one in certificates.issued(folder)}


def test_private_keys_are_their_owners_alone(tmp_path: Path) -> None:
    made = certificates.make(tmp_path / "keys", ["a", "b"])
    assert made == ["ca", "server", "a", "b"]
    for file in (tmp_path / "keys").glob("*.key"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert certificates.secret(file).startswith(b"-----BEGIN PRIVATE KEY")
    (tmp_path / "keys/a.key").chmod(0o644)
    with pytest.raises(OffbeatError, match="chmod 600"):
        certificates.secret(tmp_path / "keys/a.key")


def test_making_goes_on_and_refuses_what_is_there(tmp_path: Path) -> None:
    certificates.make(tmp_path, ["a"])
    before = certificates.read(tmp_path / "a.pem").serial_number
    assert certificates.make(tmp_path, ["b"]) == ["b"]
    for name, said in (("a", "already"), ("../x", "letters"), ("ca", "none of"), ("", "letters")):
        with pytest.raises(ConfigError, match=said):
            certificates.make(tmp_path, [name])
    with pytest.raises(ConfigError, match="days"):
        certificates.make(tmp_path, ["c"], days=0)
    assert certificates.read(tmp_path / "a.pem").serial_number == before


def test_renewed_and_revoked(tmp_path: Path) -> None:
    certificates.make(tmp_path, ["a", "b"], hosts=["server.example", "10.0.0.7"])
    old = certificates.read(tmp_path / "a.pem").serial_number
    certificates.renew(tmp_path, "a")
    certificates.revoke(tmp_path, "b")
    assert states(tmp_path) == {"a": "good", "b": "revoked", "ca": "good", "server": "good"}
    assert certificates.revoked(tmp_path) == {old, certificates.read(tmp_path / "b.pem").serial_number}
    names = certificates.alternative_names(certificates.read(tmp_path / "server.pem"))
    certificates.renew(tmp_path, "server")
    assert certificates.alternative_names(certificates.read(tmp_path / "server.pem")) == names
    assert {"server.example", "10.0.0.7", "localhost"} <= set(names)
    for act in (certificates.renew, certificates.revoke):
        with pytest.raises(ConfigError, match="CA"):
            act(tmp_path, "ca")
        with pytest.raises(OffbeatError, match="there is no"):
            act(tmp_path, "nobody")


def test_a_list_of_revoked_ones_that_another_ca_signed_is_refused(tmp_path: Path) -> None:
    for name in ("one", "other"):
        certificates.make(tmp_path / name, ["a"])
        certificates.revoke(tmp_path / name, "a")
    (tmp_path / "one/revoked.pem").write_bytes((tmp_path / "other/revoked.pem").read_bytes())
    with pytest.raises(StorageError, match="another CA"):
        certificates.revoked(tmp_path / "one")


def test_without_the_cas_key_nothing_is_made(tmp_path: Path) -> None:
    certificates.make(tmp_path, ["a"])
    (tmp_path / "ca.key").unlink()
    with pytest.raises(OffbeatError, match="only who has the CA's key"):
        certificates.make(tmp_path, ["b"])
    with pytest.raises(OffbeatError, match="only who has the CA's key"):
        certificates.revoke(tmp_path, "a")


def test_a_clock_that_is_wrong_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificates.make(tmp_path, ["a"])
    keys = transport.Keys(tmp_path, "a")
    keys.require_current()
    real = certificates.now
    for days, name in ((-1, "ca.pem"), (400, "a.pem")):
        monkeypatch.setattr(certificates, "now", lambda days=days: real() + timedelta(days=days))
        with pytest.raises(OffbeatError, match=f"{name} counts from .* this machine's clock says .*; set the clock"):
            keys.require_current()
