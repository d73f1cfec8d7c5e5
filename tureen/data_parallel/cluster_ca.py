"""A certificate authority that lives as long as a front, for its connections to engines that it starts elsewhere."""

from __future__ import annotations

import datetime
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tureen.config import Config
from tureen.files import write_private

ENGINE_NAME = "tureen-engine"
"""The name that certificates of engines are for, wherever they listen."""

FILES = ("tls_cert", "tls_key", "tls_ca")
"""Settings that name the files of one side of a connection."""

VALID = datetime.timedelta(days=3650)
SKEW = datetime.timedelta(days=1)
"""How far the clocks of machines may differ."""


class ClusterAuthority:
    """Signs certificates with a key that is never written down."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tureen cluster")])
        builder = self._builder(self._subject, self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self._certificate = builder.sign(self._key, SHA256())

    def issue(self, name: str) -> dict[str, bytes]:
        """Returns a certificate, its key and the authority's certificate, as PEM, by names of FILES."""
        key = ec.generate_private_key(ec.SECP256R1())
        use = ExtendedKeyUsageOID.SERVER_AUTH if name == ENGINE_NAME else ExtendedKeyUsageOID.CLIENT_AUTH
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(subject, key.public_key())
        builder = builder.add_extension(x509.ExtendedKeyUsage([use]), critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        return {
            "tls_cert": builder.sign(self._key, SHA256()).public_bytes(Encoding.PEM),
            "tls_key": key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
            "tls_ca": self._certificate.public_bytes(Encoding.PEM),
        }

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self._subject).public_key(key)
        builder = builder.serial_number(x509.random_serial_number())
        return builder.not_valid_before(now - SKEW).not_valid_after(now + VALID)


def write_files(contents: dict[str, bytes], folder: Path) -> None:
    """Writes what `ClusterAuthority.issue` returns to files that only their owner may read."""
    for name, content in contents.items():
        path = folder / f"{name}.pem"
        path.unlink(missing_ok=True)
        write_private(path, content)


def with_files(config: Config, folder: Path, prefix: str = "") -> Config:
    """Returns settings that name the files which `write_files` has written there. prefix: of the settings' names."""
    return msgspec.structs.replace(config, **{prefix + name: str(folder / f"{name}.pem") for name in FILES})
