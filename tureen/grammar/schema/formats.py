"""The names of `format` in JSON schemas: for each a set of strings, never one that the name's specification forbids."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from tureen.grammar import regex
from tureen.grammar.expression import Expression
from tureen.grammar.schema.regex_format import regex_strings
from tureen.grammar.schema.strings import StringSet


def _alternatives(*items: str) -> str:
    return f"(?:{'|'.join(items)})"


# RFC 3339; years from 0001, no leap seconds, at most nine digits of a second
YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
DAYS = _alternatives(
    "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])",
    "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)",
    "02-(?:0[1-9]|1[0-9]|2[0-8])",
)
DATE = f"(?:{YEAR}-{DAYS}|{LEAP_YEAR}-02-29)"
CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
TIME = rf"{CLOCK}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{CLOCK})"

# RFC 3339, appendix A; numbers of at most six digits: Python's timedelta holds them all
COUNT = "[0-9]{1,6}"
TIME_PART = f"T(?:{COUNT}H(?:{COUNT}M(?:{COUNT}S)?)?|{COUNT}M(?:{COUNT}S)?|{COUNT}S)"
DATE_PART = f"(?:{COUNT}Y(?:{COUNT}M(?:{COUNT}D)?)?|{COUNT}M(?:{COUNT}D)?|{COUNT}D)"
DURATION = f"P(?:{DATE_PART}(?:{TIME_PART})?|{TIME_PART}|{COUNT}W)"

# RFC 4122
UUID = "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
HEX = "[0-9a-fA-F]"
UUIDS = {
    f"uuid{version}": f"{HEX}{{8}}-{HEX}{{4}}-{version}{HEX}{{3}}-[89abAB]{HEX}{{3}}-{HEX}{{12}}"
    for version in range(1, 9)
}

# RFC 2673 (four decimal numbers without leading zeros), RFC 4291 (without dotted decimals at the end)
OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
IPV4 = rf"{OCTET}(?:\.{OCTET}){{3}}"
GROUP = "[0-9a-fA-F]{1,4}"
IPV6 = _alternatives(
    f"{GROUP}(?::{GROUP}){{7}}",
    f"::(?:{GROUP}(?::{GROUP}){{0,6}})?",
    *(f"{GROUP}(?::{GROUP}){{{size - 1}}}::(?:{GROUP}(?::{GROUP}){{0,{6 - size}}})?" for size in range(1, 7)),
    f"{GROUP}(?::{GROUP}){{6}}::",
)
IP = _alternatives(IPV4, IPV6)

# With the length of a prefix; networks have zeros behind it
PREFIX_4 = "/(?:[12]?[0-9]|3[0-2])"
PREFIX_6 = "/(?:[1-9]?[0-9]|1[01][0-9]|12[0-8])"
INTERFACE_4, INTERFACE_6 = f"{IPV4}(?:{PREFIX_4})?", f"{IPV6}(?:{PREFIX_6})?"
NETWORK_4 = _alternatives(
    f"{IPV4}/32",
    *(rf"{OCTET}(?:\.{OCTET}){{{size - 1}}}(?:\.0){{{4 - size}}}/{8 * size}" for size in range(1, 4)),
    r"0\.0\.0\.0/0",
)
NETWORK_6 = _alternatives(
    f"{IPV6}/128", *(f"{GROUP}(?::{GROUP}){{{size - 1}}}::/{16 * size}" for size in range(1, 7)), "::/0"
)

# RFC 1123; no "--", which RFC 5891 reserves at one place, and no long labels but the first: so 253 characters suffice
HOSTNAME = r"[a-zA-Z0-9](?:-?[a-zA-Z0-9]){0,31}(?:\.[a-zA-Z0-9](?:-?[a-zA-Z0-9]){0,14}){0,6}"

# RFC 5321 without quoted strings and address literals; short atoms: so 64 characters suffice
ATOM = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]"
EMAIL = rf"{ATOM}{{1,31}}(?:\.{ATOM}{{1,15}}){{0,2}}@{HOSTNAME}"


# Of RFC 3986, which limits no length
HOST = r"[a-zA-Z0-9]+(?:[.-][a-zA-Z0-9]+)*"


def _references(unreserved: str) -> tuple[str, str]:
    """Identifiers with a scheme, and references, of RFC 3986 (RFC 3987 with more unreserved characters).

    Hosts are names, among them IPv4 addresses, or left out.
    """
    sub_delims = r"!$&'()*+,;="
    encoded = "%[0-9A-Fa-f]{2}"
    char = f"(?:[{unreserved}{sub_delims}:@-]|{encoded})"
    no_colon = f"(?:[{unreserved}{sub_delims}@-]|{encoded})"
    segments = f"(?:/{char}*)*"
    user = f"(?:[{unreserved}{sub_delims}:-]|{encoded})*@"
    authority = rf"//(?:(?:{user})?{HOST}(?::[0-9]{{1,5}})?)?"
    absolute = f"/(?:{char}+{segments})?"
    tail = rf"(?:\?(?:{char}|[/?])*)?(?:#(?:{char}|[/?])*)?"
    scheme = "[a-zA-Z][a-zA-Z0-9+.-]*:"
    whole = f"{scheme}(?:{authority}{segments}|{absolute}|{char}+{segments})?{tail}"
    relative = f"(?:{authority}{segments}|{absolute}|{no_colon}+{segments})?{tail}"
    return whole, f"(?:{whole}|{relative})"


UNRESERVED = r"a-zA-Z0-9._~"
URI, URI_REFERENCE = _references(UNRESERVED)
BEYOND_ASCII = r"\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef" + "".join(
    rf"\u{{{plane:x}0000}}-\u{{{plane:x}fffd}}" for plane in range(1, 14)
)
IRI, IRI_REFERENCE = _references(UNRESERVED + BEYOND_ASCII)

# RFC 6901, and the draft for relative pointers
JSON_POINTER = "(?:/(?:[^/~]|~[01])*)*"
RELATIVE_JSON_POINTER = f"(?:0|[1-9][0-9]{{0,8}})(?:#|{JSON_POINTER})"

# RFC 6570, literals being what RFC 3986 has, and the other characters of RFC 3987
LITERAL = r"(?:[a-zA-Z0-9._~:/?#\[\]@!$&()*+,;=\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef-]|%[0-9A-Fa-f]{2})"
VARIABLE = r"[a-zA-Z0-9_]+(?:\.[a-zA-Z0-9_]+)*(?::[1-9][0-9]{0,3}|\*)?"
URI_TEMPLATE = rf"(?:{LITERAL}|\{{[+#./;?&]?{VARIABLE}(?:,{VARIABLE})*\}})*"

# Several hosts, as databases have them
SERVER = f"{HOST}(?::[0-9]{{1,4}})?"
MULTI_HOST_URI = rf"[a-zA-Z][a-zA-Z0-9+.-]*://{SERVER}(?:,{SERVER})*(?:/[{UNRESERVED}-]*)*"


def _base64(more: str) -> str:
    """RFC 4648, padded, the bits that stand for nothing being zero."""
    char = f"[A-Za-z0-9{more}]"
    return f"(?:{char}{{4}})*(?:{char}[AQgw]==|{char}{{2}}[AEIMQUYcgkosw048]=)?"


DECIMAL = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?"
FRACTION = "-?(?:0|[1-9][0-9]{0,17})(?:/[1-9][0-9]{0,17})?"
NAME_EMAIL = f"[A-Za-z]+(?: [A-Za-z]+)* <{EMAIL}>"

FORMATS: dict[str, str | Callable[[], Expression]] = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "duration": DURATION,
    "uuid": UUID,
    "ipv4": IPV4,
    "ipv6": IPV6,
    "hostname": HOSTNAME,
    "idn-hostname": HOSTNAME,
    "email": EMAIL,
    "idn-email": EMAIL,
    "uri": URI,
    "uri-reference": URI_REFERENCE,
    "iri": IRI,
    "iri-reference": IRI_REFERENCE,
    "json-pointer": JSON_POINTER,
    "relative-json-pointer": RELATIVE_JSON_POINTER,
    "uri-template": URI_TEMPLATE,
    "regex": regex_strings,
    # OpenAPI's registry, pydantic
    "url": URI,
    "multi-host-uri": MULTI_HOST_URI,
    **UUIDS,
    "byte": _base64("+/"),
    "base64": _base64("+/"),
    "base64url": _base64("_-"),
    "decimal": DECIMAL,
    "fraction": FRACTION,
    "name-email": NAME_EMAIL,
    "ipv4interface": INTERFACE_4,
    "ipv6interface": INTERFACE_6,
    "ipv4network": NETWORK_4,
    "ipv6network": NETWORK_6,
    "ipvanyaddress": IP,
    "ipvanyinterface": _alternatives(INTERFACE_4, INTERFACE_6),
    "ipvanynetwork": _alternatives(NETWORK_4, NETWORK_6),
}
"""Patterns for whole strings, or functions that return an expression. Every string that matches is of the format; where
the format is rich, not the reverse.

Any other name is an annotation: also "binary", "password", "path", of which every string is.
"""


def format_strings(name: str) -> StringSet | None:
    """Returns strings of this format, not always all of them; None where the name says nothing about strings."""
    return _strings(name) if name in FORMATS else None


@cache
def _strings(name: str) -> StringSet:
    """One set for all schemas: what is found out about it is kept."""
    return StringSet(in_format(name))


@cache
def in_format(name: str) -> Expression:
    """Returns the strings of a format of `FORMATS` as an expression over decoded characters."""
    known = FORMATS[name]
    return regex.parse(known, flavour="ecma") if isinstance(known, str) else known()
