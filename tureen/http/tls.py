"""Makes the TLS context from the settings, and reads the name in a client's certificate."""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Mapping
from typing import Any

from tureen.config import Config
from tureen.errors import StartupError
from tureen.extras import require

CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20:@SECLEVEL=2"
"""Cipher suites of TLS 1.2: forward secret and authenticated (AEAD). Security level 2 excludes RSA keys below 2048 bits
and SHA-1 signatures."""

MAX_NAME_CHARS = 64
VERIFY = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}


def load_context(config: Config) -> ssl.SSLContext | None:
    """Makes the server's TLS context from the settings; None = plain HTTP. Raises StartupError naming flag and file."""
    _check_flags(config)
    if config.tls_cert is None or config.tls_key is None:
        return None
    require("--tls-cert", "cryptography", field="tls_cert")
    from tureen.http import certificates  # noqa: PLC0415 - a library that plain HTTP has no use for

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3 if config.tls_min_version == "1.3" else ssl.TLSVersion.TLSv1_2
    context.set_ciphers(CIPHERS)
    # Without tickets each connection must prove its certificate. With TLS 1.2 a client can still resume by session
    # id, but only with the context that knows the session: never after a reload.
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET
    context.num_tickets = 0
    certificates.load_own(context, config.tls_cert, config.tls_key, config.tls_key_password_file)
    if config.tls_ca is not None:
        authorities = certificates.load_authorities(context, config.tls_ca)
        if config.tls_crl is not None:
            certificates.load_revoked(context, config.tls_crl, authorities)
        context.verify_mode = VERIFY[config.tls_client_auth or "required"]
    return context


def _check_flags(config: Config) -> None:
    needs = {
        "--tls-cert": (config.tls_cert, "--tls-key", config.tls_key),
        "--tls-key": (config.tls_key, "--tls-cert", config.tls_cert),
        "--tls-key-password-file": (config.tls_key_password_file, "--tls-key", config.tls_key),
        "--tls-ca": (config.tls_ca, "--tls-cert", config.tls_cert),
        "--tls-crl": (config.tls_crl, "--tls-ca", config.tls_ca),
        "--tls-client-auth": (_asks(config), "--tls-ca", config.tls_ca),
    }
    for flag, (value, other, other_value) in needs.items():
        if value is not None and other_value is None:
            raise StartupError(f"{flag} {value}: it needs {other} too")


def _asks(config: Config) -> str | None:
    return None if config.tls_client_auth == "none" else config.tls_client_auth


def subject_name(certificate: Mapping[str, Any] | None) -> str:
    """Returns the common name, else the first alternative name, else the serial number of a verified certificate; "" =
    no certificate.

    `certificate`: as `ssl.SSLSocket.getpeercert()` returns it. The name is printable and has at most 64 characters; a
    name that was changed for this ends with a digest, so that no two clients get the same name.
    """
    if not certificate:
        return ""
    common = [value for part in certificate.get("subject", ()) for kind, value in part if kind == "commonName"]
    others = [value for _, value in certificate.get("subjectAltName", ()) if isinstance(value, str)]
    name = next((name for name in [*common[-1:], *others] if name), f"serial {certificate.get('serialNumber', '?')}")
    if len(name) <= MAX_NAME_CHARS and name.isprintable():
        return name
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:12]
    shown = "".join(char if char.isprintable() else "?" for char in name)
    return f"{shown[: MAX_NAME_CHARS - len(digest) - 1]}#{digest}"
