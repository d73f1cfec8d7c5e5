"""Loads certificates, keys and revocation lists for TLS, and checks them before they are used."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import ssl
from collections.abc import Iterator, Sequence

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from tureen.clients.keys import read_file, read_secret
from tureen.errors import StartupError

CRL_BLOCK = re.compile(rb"-----BEGIN X509 CRL-----.*?-----END X509 CRL-----", re.DOTALL)
OTHER_BLOCK = re.compile(rb"-----BEGIN (?!X509 CRL-----)")


@contextlib.contextmanager
def _fault(flag: str, path: str, problem: str) -> Iterator[None]:
    """Turns parser errors inside the block into a StartupError, because their own messages do not help an operator.

    `problem`: what is wrong with the file `path` of `flag`.
    """
    try:
        yield
    except (ValueError, TypeError, UnsupportedAlgorithm, OSError) as error:
        reason = f" ({error.reason})" if isinstance(error, ssl.SSLError) and error.reason else ""
        raise StartupError(f"{flag} {path}: {problem}{reason}") from None


@contextlib.contextmanager
def _named(content: bytes) -> Iterator[str]:
    """Yields a file name for content that was read and checked, for a library that accepts only names. The name is that
    of a copy in memory, because the original may have been replaced since."""
    if not hasattr(os, "memfd_create"):
        import tempfile  # noqa: PLC0415 - Linux never needs it

        with tempfile.NamedTemporaryFile() as file:  # no other user may read it
            file.write(content)
            file.flush()
            yield file.name
        return
    with open(os.memfd_create("pem"), "wb") as memory:
        memory.write(content)
        memory.flush()
        yield f"/proc/self/fd/{memory.fileno()}"


def load_own(
    context: ssl.SSLContext, cert_path: str, key_path: str, password_path: str | None = None, flags: str = "--tls"
) -> None:
    """Loads a certificate chain and its private key into `context`. Raises StartupError naming flag and file.

    `flags`: the beginning of the flags that name the files, such as `--tls` of `--tls-cert`.
    """
    cert_flag, key_flag = f"{flags}-cert", f"{flags}-key"
    cert, key = read_file(cert_flag, cert_path), read_secret(key_flag, key_path)
    chain = _certificates(cert_flag, cert_path, cert)
    password = None
    if password_path is not None:
        password = read_secret("--tls-key-password-file", password_path).rstrip(b"\r\n")
    public = _public_key(key_flag, key_path, key, password, password_path)
    with _fault(cert_flag, cert_path, "its kind of key is not supported"):
        certified = _encoded(chain[0].public_key())
    if public != certified:
        raise StartupError(
            f"{key_flag} {key_path}: it is not the key of the first certificate in {cert_flag} {cert_path}"
        )
    problem = f"TLS does not accept it with {key_flag} {key_path}"
    with _fault(cert_flag, cert_path, problem), _named(cert) as cert_name, _named(key) as key_name:
        # the password is a callback, or OpenSSL would ask for it on the terminal
        context.load_cert_chain(cert_name, key_name, password=lambda: password or b"")


def _public_key(flag: str, path: str, content: bytes, password: bytes | None, password_path: str | None) -> bytes:
    problem = "it has no PEM private key"
    if b"ENCRYPTED" in content:
        problem = f"the password in --tls-key-password-file {password_path} does not open it"
        if password is None:
            problem = "it is encrypted; give the file with its password as --tls-key-password-file"
    elif password is not None:
        problem += f", or it is not encrypted and --tls-key-password-file {password_path} is to be left out"
    with _fault(flag, path, problem):
        return _encoded(load_pem_private_key(content, password).public_key())


def _encoded(key: PublicKeyTypes) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _certificates(flag: str, path: str, content: bytes) -> list[x509.Certificate]:
    with _fault(flag, path, "it has no valid PEM certificate"):
        certificates = x509.load_pem_x509_certificates(content)
    now = datetime.datetime.now(datetime.UTC)
    for certificate in certificates:
        if certificate.not_valid_after_utc < now:
            raise StartupError(
                f"{flag} {path}: a certificate in it expired at {certificate.not_valid_after_utc:%F %T} UTC"
            )
        if certificate.not_valid_before_utc > now:
            start = certificate.not_valid_before_utc
            raise StartupError(f"{flag} {path}: a certificate in it is not valid before {start:%F %T} UTC")
    return certificates


def load_authorities(context: ssl.SSLContext, path: str, flag: str = "--tls-ca") -> list[x509.Certificate]:
    """Loads the CAs that may sign the other side's certificates into `context` and returns them.

    `flag`: the flag that names the file. Raises StartupError.
    """
    authorities = _certificates(flag, path, read_file(flag, path))
    pem = b"".join(authority.public_bytes(Encoding.PEM) for authority in authorities)
    with _fault(flag, path, "TLS does not accept it"):
        context.load_verify_locations(cadata=pem.decode())
    return authorities


def load_revoked(context: ssl.SSLContext, path: str, authorities: Sequence[x509.Certificate]) -> None:
    """Loads revocation lists into `context`. OpenSSL looks up every certificate from the client's to the root, so each
    CA in `authorities` needs a list that it has signed.

    Raises StartupError.
    """
    content = read_file("--tls-crl", path)
    if OTHER_BLOCK.search(content):
        # a certificate in it would become a trusted CA
        raise StartupError(f"--tls-crl {path}: it contains something other than revocation lists")
    with _fault("--tls-crl", path, "it has no valid PEM revocation list"):
        lists = [x509.load_pem_x509_crl(block) for block in CRL_BLOCK.findall(content)]
    if not lists:
        raise StartupError(f"--tls-crl {path}: it has no PEM revocation list")
    for crl in lists:
        _check_times(crl, path)
        if not any(_has_signed(authority, crl) for authority in authorities):
            raise StartupError(f"--tls-crl {path}: a list in it is not signed by a CA in --tls-ca")
    for authority in authorities:
        if not any(_has_signed(authority, crl) for crl in lists):
            name = authority.subject.rfc4514_string()
            raise StartupError(f"--tls-crl {path}: it has no list of the CA {name!r}, so its clients would be refused")
    with _fault("--tls-crl", path, "TLS does not accept it"), _named(content) as name:
        context.load_verify_locations(cafile=name)
    context.verify_flags |= ssl.VERIFY_CRL_CHECK_CHAIN


def _check_times(crl: x509.CertificateRevocationList, path: str) -> None:
    now = datetime.datetime.now(datetime.UTC)
    if crl.next_update_utc is not None and crl.next_update_utc < now:
        raise StartupError(f"--tls-crl {path}: a list in it expired at {crl.next_update_utc:%F %T} UTC")
    if crl.last_update_utc > now:
        raise StartupError(f"--tls-crl {path}: a list in it is not valid before {crl.last_update_utc:%F %T} UTC")


def _has_signed(authority: x509.Certificate, crl: x509.CertificateRevocationList) -> bool:
    if authority.subject != crl.issuer:
        return False
    try:
        return crl.is_signature_valid(authority.public_key())  # type: ignore[arg-type]  # others raise TypeError
    except (TypeError, ValueError, UnsupportedAlgorithm):
        return False
