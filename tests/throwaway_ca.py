"""A certificate authority for one test: certificates with elliptic-curve keys, revocation lists, all as PEM files."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

HOUR = datetime.timedelta(hours=1)
VALID, EXPIRED, FUTURE = (-1, 1), (-2, -1), (1, 2)
"""From when to when something is valid, in hours from now."""

SIGNS = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


class Pair(NamedTuple):
    """Files of a certificate and its key."""

    cert: str
    key: str


class Authority:
    """Signs certificates and writes them into `folder`; `self.cert` is the file with its own."""

    def __init__(self, folder: Path, name: str = "ca", *, valid=VALID, issuer: Authority | None = None) -> None:
        self._folder = folder
        self._serials: dict[str, int] = {}
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = _builder(self.subject, self._key, valid).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        builder = builder.add_extension(SIGNS, critical=True)
        parent = issuer or self
        signed = parent._sign(builder)
        self.cert = _write(folder / f"{name}.pem", signed.public_bytes(Encoding.PEM))
        parent._serials[self.cert] = signed.serial_number

    def issue(self, name: str, *, valid=VALID, password: str | None = None, for_server=False, subject=None) -> Pair:
        """A pair called `name`; `subject` in place of a common name `name`."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = subject or x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        use = ExtendedKeyUsageOID.SERVER_AUTH if for_server else ExtendedKeyUsageOID.CLIENT_AUTH
        builder = _builder(subject, key, valid).add_extension(x509.ExtendedKeyUsage([use]), critical=False)
        if for_server:
            names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        signed = self._sign(builder)
        encryption = NoEncryption() if password is None else BestAvailableEncryption(password.encode())
        secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)
        cert = _write(self._folder / f"{name}.pem", signed.public_bytes(Encoding.PEM))
        self._serials[cert] = signed.serial_number
        return Pair(cert, _write(self._folder / f"{name}.key.pem", secret))

    def _sign(self, builder: x509.CertificateBuilder) -> x509.Certificate:
        """Names the key that signs, which Python's default contexts ask for from 3.13 on."""
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return builder.add_extension(signer, critical=False).issuer_name(self.subject).sign(self._key, SHA256())

    def revoke(self, *holders: Pair | Authority, name: str = "crl", valid=VALID) -> str:
        """The file of a list that revokes exactly the certificates of `holders`."""
        start, end = _times(valid)
        builder = x509.CertificateRevocationListBuilder(self.subject).last_update(start).next_update(end)
        for holder in holders:
            entry = x509.RevokedCertificateBuilder(self._serials[holder.cert], start).build()
            builder = builder.add_revoked_certificate(entry)
        return _write(self._folder / f"{name}.pem", builder.sign(self._key, SHA256()).public_bytes(Encoding.PEM))


def _builder(subject, key, valid) -> x509.CertificateBuilder:
    start, end = _times(valid)
    builder = x509.CertificateBuilder().subject_name(subject).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return builder.not_valid_before(start).not_valid_after(end).add_extension(own, critical=False)


def _times(valid) -> tuple[datetime.datetime, datetime.datetime]:
    now = datetime.datetime.now(datetime.UTC)
    return now + valid[0] * HOUR, now + valid[1] * HOUR


def _write(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    path.chmod(0o600)
    return str(path)
