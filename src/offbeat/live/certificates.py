"""Certificates: a CA of one's own, keys for the server and for each client, renewed and revoked.

    ca.pem, ca.key          who signs; the key stays with the operator
    server.pem, server.key  the server, for the hosts that it was made for
    NAME.pem, NAME.key      a client: the certificate's name is its identity
    revoked.pem             what the CA has taken back, signed by it

Private keys are written readable by their owner only. Made with the package `cryptography` (extra `live`).
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from offbeat.errors import ConfigError, OffbeatError, StorageError
from offbeat.runs.disk import reason, write_file

CA, SERVER, REVOKED = "ca", "server", "revoked"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
CA_DAYS, DAYS = 3650, 365
EARLY = timedelta(minutes=5)  # a certificate counts from a little earlier on: clocks differ


@dataclass(frozen=True)
class Issued:
    """One certificate of a folder."""

    name: str
    serial: int
    until: datetime
    revoked: bool

    @property
    def expired(self) -> bool:
        return self.until <= now()


def now() -> datetime:
    return datetime.now(timezone.utc)


def make(folder: Path, clients: Sequence[str] = (), hosts: Sequence[str] = (), days: float = DAYS) -> list[str]:
    """A CA and a server's certificate where there are none yet, and one for each of these clients; the names made."""
    if problems := [problem for name in clients for problem in name_problems(folder, name)]:
        raise ConfigError(problems)
    made = []
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not (folder / f"{CA}.key").exists():
            if (folder / f"{CA}.pem").exists():
                raise OffbeatError(f"{folder} has {CA}.pem but not {CA}.key: only who has the CA's key makes new ones")
            create_ca(folder)
            made.append(CA)
        if hosts or not (folder / f"{SERVER}.pem").exists():
            issue(folder, SERVER, ["localhost", "127.0.0.1", "::1", *hosts], days)
            made.append(SERVER)
        for name in clients:
            issue(folder, name, (), days)
            made.append(name)
    except OSError as error:
        raise StorageError(f"cannot write {folder}: {reason(error)}") from None
    return made


def name_problems(folder: Path, name: str) -> list[str]:
    if not NAME.fullmatch(name) or name in (CA, SERVER, REVOKED):
        return [
            f"client '{name[:80]}': a name has letters, digits, '.', '_' and '-', 63 at most, and is none of "
            f"{CA}, {SERVER}, {REVOKED}"
        ]
    if (folder / f"{name}.pem").exists():
        return [f"{folder} has a certificate of {name} already; `offbeat keys renew` makes another one"]
    return []


def renew(folder: Path, name: str, hosts: Sequence[str] = (), days: float = DAYS) -> None:
    """A new key and certificate in the place of the old ones, which are revoked."""
    old = read(folder / f"{name}.pem")
    if name == CA:
        raise ConfigError(["a new CA makes every certificate void: make a new folder instead"])
    names = list(hosts) or alternative_names(old)
    issue(folder, name, names if name == SERVER else (), days)
    take_back(folder, old.serial_number)


def revoke(folder: Path, name: str) -> None:
    """Nobody is let in with this certificate any more; a server that runs notices by itself."""
    if name == CA:
        raise ConfigError(["the CA itself cannot be revoked; make a new folder, and give everyone new certificates"])
    take_back(folder, read(folder / f"{name}.pem").serial_number)


def issued(folder: Path) -> list[Issued]:
    taken = revoked(folder)
    certificates = []
    for file in sorted(folder.glob("*.pem")):
        if file.stem != REVOKED:
            one = read(file)
            certificates.append(
                Issued(file.stem, one.serial_number, one.not_valid_after_utc, one.serial_number in taken)
            )
    if not certificates:
        raise OffbeatError(f"there are no certificates in {folder}; `offbeat keys make {folder}` makes some")
    return certificates


def revoked(folder: Path) -> set[int]:
    """Serial numbers that the CA has taken back. A list that it did not sign is refused."""
    file = folder / f"{REVOKED}.pem"
    if not file.exists():
        return set()
    try:
        listed = x509.load_pem_x509_crl(file.read_bytes())
        key = read(folder / f"{CA}.pem").public_key()
        if not listed.is_signature_valid(key):  # type: ignore[arg-type]
            raise ValueError
    except (ValueError, TypeError, InvalidSignature):
        raise StorageError(
            f"{file} is damaged, or signed by another CA; nobody is let in before it is put right"
        ) from None
    return {one.serial_number for one in listed}


# ---- making -------------------------------------------------------------------------------------
def create_ca(folder: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = common_name("Offbeat CA")
    builder = started(name, name, key.public_key(), CA_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(usage(signing=True), critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    store(folder, CA, key, builder.sign(key, hashes.SHA256()))


def issue(folder: Path, name: str, hosts: Sequence[str], days: float) -> None:
    if not 0 < days <= CA_DAYS:
        raise ConfigError([f"days = {days}; a certificate is good for more than 0 and at most {CA_DAYS} days"])
    signer, signing_key = read(folder / f"{CA}.pem"), read_key(folder / f"{CA}.key")
    key = ec.generate_private_key(ec.SECP256R1())
    builder = started(common_name(name), signer.subject, key.public_key(), days)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(usage(signing=False), critical=True)
    # Devices of a cluster serve one another, so a client's certificate is good for both ends.
    ends = [ExtendedKeyUsageOID.SERVER_AUTH, *([] if hosts else [ExtendedKeyUsageOID.CLIENT_AUTH])]
    builder = builder.add_extension(x509.ExtendedKeyUsage(ends), critical=False)
    names = [host_name(host) for host in dict.fromkeys(hosts)] or [x509.DNSName(name)]
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    above = x509.AuthorityKeyIdentifier.from_issuer_public_key(signing_key.public_key())
    builder = builder.add_extension(above, critical=False)
    store(folder, name, key, builder.sign(signing_key, hashes.SHA256()))


def started(name: x509.Name, signer: x509.Name, key: ec.EllipticCurvePublicKey, days: float) -> x509.CertificateBuilder:
    begin = now()
    return (
        x509.CertificateBuilder().subject_name(name).issuer_name(signer).public_key(key)
        .serial_number(x509.random_serial_number()).not_valid_before(begin - EARLY)
        .not_valid_after(begin + timedelta(days=days))
    )  # fmt: skip


def usage(signing: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=signing, crl_sign=signing, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def take_back(folder: Path, serial: int) -> None:
    signer, key = read(folder / f"{CA}.pem"), read_key(folder / f"{CA}.key")
    begin = now()
    builder = x509.CertificateRevocationListBuilder().issuer_name(signer.subject).last_update(begin)
    builder = builder.next_update(begin + timedelta(days=CA_DAYS))
    for number in sorted({*revoked(folder), serial}):
        one = x509.RevokedCertificateBuilder().serial_number(number).revocation_date(begin).build()
        builder = builder.add_revoked_certificate(one)
    text = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    write_file(folder / f"{REVOKED}.pem", lambda at: at.write_bytes(text))


def store(folder: Path, name: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    write_file(folder / f"{name}.key", lambda at: write_secret(at, secret))
    text = certificate.public_bytes(serialization.Encoding.PEM)
    write_file(folder / f"{name}.pem", lambda at: at.write_bytes(text))


def write_secret(file: Path, secret: bytes) -> None:
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "wb") as out:
        out.write(secret)


# ---- reading ------------------------------------------------------------------------------------
def read(file: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(file.read_bytes())
    except FileNotFoundError:
        raise OffbeatError(f"there is no {file}; `offbeat keys list {file.parent}` shows what is there") from None
    except (OSError, ValueError) as error:
        raise StorageError(f"{file} is no certificate: {error}") from None


def require_current(file: Path) -> None:
    """Refuses a certificate that does not count now, by this machine's clock."""
    one = read(file)
    begin, end = one.not_valid_before_utc, one.not_valid_after_utc
    if not begin <= now() < end:
        raise OffbeatError(
            f"{file} counts from {begin:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC, and this machine's clock says "
            f"{now():%Y-%m-%d %H:%M}; set the clock, or renew the certificate"
        )


def text(file: Path) -> bytes:
    return read(file).public_bytes(serialization.Encoding.PEM)


def read_key(file: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(file.read_bytes(), None)
    except FileNotFoundError:
        raise OffbeatError(f"there is no {file}; only who has the CA's key makes, renews and revokes") from None
    except (OSError, ValueError, TypeError) as error:
        raise StorageError(f"{file} is no private key: {error}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise StorageError(f"{file} holds a key of another kind than `offbeat keys` makes")
    return key


def secret(file: Path) -> bytes:
    """A private key as it lies there; one that others may read is refused."""
    try:
        if os.stat(file).st_mode & 0o077:
            raise OffbeatError(f"{file} can be read by others; say `chmod 600 {file}`")
        return file.read_bytes()
    except OSError as error:
        raise OffbeatError(f"{file} cannot be read: {error.strerror}") from None


def named(pem: bytes) -> tuple[str, int, datetime]:
    """Whose certificate this is, its serial number, and until when it is good."""
    one = x509.load_pem_x509_certificate(pem)
    names = one.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else "", one.serial_number, one.not_valid_after_utc


def alternative_names(one: x509.Certificate) -> list[str]:
    try:
        names = one.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in names]
