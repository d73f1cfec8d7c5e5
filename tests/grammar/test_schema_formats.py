"""Formats against the standard library, a JSON schema validator, and lists of good and bad examples."""

from __future__ import annotations

import base64
import datetime
import decimal
import email.utils
import fractions
import ipaddress
import itertools
import json
import random
import uuid

import jsonschema_rs
import pytest
from matching import matches
from pydantic_core import MultiHostUrl
from real_schemas import corpus
from regexes import changes, drawn, is_pattern_of_re, patterns_in

from tureen.grammar import regular
from tureen.grammar.schema.formats import FORMATS, format_strings, in_format
from tureen.grammar.schema.language import json_schema

KNOWN_ELSEWHERE = (
    "color",
    "date-time-local",
    "host-name",
    "ip-address",
    "int32",
    "path",
    "password",
    "binary",
    "phone",
)

GOOD = {
    "date": ["2024-02-29", "1999-12-31", "0001-01-01", "2000-02-29"],
    "time": ["12:00:00Z", "23:59:59.123456789+05:30", "00:00:00-23:59"],
    "date-time": ["2024-05-06T07:08:09Z", "1990-12-31T15:59:50.5-08:00"],
    "duration": ["P1Y2M3DT4H5M6S", "P4W", "PT0S", "P3D", "PT36H", "P1YT1M"],
    "uuid": ["2eb8aa08-aa98-11ea-b4aa-73b441d16380", "2EB8AA08-AA98-11EA-B4AA-73B441D16380"],
    "ipv4": ["127.0.0.1", "255.255.255.255", "0.0.0.0", "10.20.30.249"],
    "ipv6": ["::", "::1", "2001:db8::ff00:42:8329", "1:2:3:4:5:6:7:8", "fe80::", "1:2:3:4:5:6:7::", "::2:3:4:5:6:7:8"],
    "hostname": ["example.com", "localhost", "ec2-1-2-3-4.eu-west-1.compute.amazonaws.com", "a", "1.2"],
    "idn-hostname": ["example.com"],
    "email": ["joe.bloggs@example.com", "a+b_c@mail.example.org", "x@localhost"],
    "idn-email": ["joe.bloggs@example.com"],
    "uri": [
        "https://example.com", "http://foo.bar/?baz=qux#quux", "mailto:John.Doe@example.com", "urn:oasis:names:docbook",
        "ftp://user:pw@ftp.example.com:21/a%20b/c;d", "tel:+1-816-555-1212", "file:///etc/hosts", "a:",
        "http://192.168.0.1:8080/",
    ],
    "uri-reference": ["", "/abc", "../a/b?c#d", "//example.com/x", "#frag", "http://a.b/c", "?q"],
    "iri": ["http://example.com/ƒøø/?∂éœ=πîx#πîüx"],
    "iri-reference": ["/âππ", "#ƒräg"],
    "json-pointer": ["", "/", "/foo/bar~0/baz~1/%a", "/é😀/0"],
    "relative-json-pointer": ["1", "0/foo/bar", "2/0/baz~1", "0#"],
    "uri-template": ["", "http://example.com/{user}/x{?q,lang*}", "{+path}/here", "/a%20{x:3}", "{#frag.a_b}"],
    "regex": [
        "a", "^[a-z0-9_]+$", r"\d{3}|(?:a(b|[^c])*)+?", r"\\\.x.", "a{2,}", "a{1,3}", "$", "^a|b$", "", r"(a|)\b",
        "[a-zA-Z0-9-_.]{13,19}", r"^(?!.*--)(?:(?!x).)*(?<=[ab])$", r"[\x20-\x7e\u4e00-\u9fa5à-ÿ^]\/", "(?:a(b(c(d))))",
    ],
    "url": ["https://example.com/a?b#c", "ftp://user@host:21/x"],
    "multi-host-uri": ["postgresql://a.b:5432,c.d/db", "redis://h"],
    "uuid1": ["2eb8aa08-aa98-11ea-b4aa-73b441d16380"],
    "uuid2": ["2eb8aa08-aa98-21ea-b4aa-73b441d16380"],
    "uuid3": ["6FA459EA-EE8A-3CA4-894E-DB77E160355E"],
    "uuid4": ["f47ac10b-58cc-4372-a567-0e02b2c3d479"],
    "uuid5": ["886313e1-3b8a-5372-9b90-0c9aee199e5d"],
    "uuid6": ["1ec9414c-232a-6b00-b3c8-9f6bdeced846"],
    "uuid7": ["017f22e2-79b0-7cc3-98c4-dc0c0c07398f"],
    "uuid8": ["2489e9ad-2ee2-8e00-8ec9-32d5f69181c0"],
    "byte": ["", "QQ==", "QUI=", "QUJD", "++//"],
    "base64": ["", "QQ==", "QUI=", "QUJD", "++//"],
    "base64url": ["", "QQ==", "QUI=", "QUJD", "--__"],
    "decimal": ["0", "-1", "10.50", "0.001", "123456789012345678901234567890.5"],
    "fraction": ["1/3", "-7", "0", "22/7"],
    "name-email": ["Ada Lovelace <ada@example.com>", "x <y@z>"],
    "ipv4interface": ["192.0.2.5/24", "10.0.0.1", "1.2.3.4/32"],
    "ipv6interface": ["2001:db8::1000/124", "::1"],
    "ipv4network": ["192.0.2.0/24", "10.0.0.0/8", "1.2.3.4/32", "0.0.0.0/0"],
    "ipv6network": ["2001:db8::/32", "::1/128", "::/0"],
    "ipvanyaddress": ["192.0.2.5", "2001:db8::1000"],
    "ipvanyinterface": ["192.0.2.5/24", "::1/128"],
    "ipvanynetwork": ["192.0.2.0/24", "2001:db8::/32"],
}  # fmt: skip

BAD = {
    "date": ["2023-02-29", "1900-02-29", "2024-04-31", "2024-13-01", "2024-1-1", "0000-01-01", "2024-01-01 "],
    "time": ["24:00:00Z", "12:60:00Z", "12:00:60Z", "12:00:00", "12:00Z", "12:00:00.Z", "12:00:00+24:00", "12:00:00z"],
    "date-time": ["2024-02-30T00:00:00Z", "2024-05-06 07:08:09Z", "2024-05-06T07:08:09"],
    "duration": ["P", "PT", "P1", "P1Y1D", "P1W1D", "1Y", "PT1H1S", "P1D1M", "P1.5D", "PT1D"],
    "uuid": ["2eb8aa08aa9811eab4aa73b441d16380", "2eb8aa08-aa98-11ea-b4aa-73b441d1638", "g" * 36],
    "ipv4": ["256.0.0.1", "1.2.3", "1.2.3.4.5", "01.2.3.4", "1.2.3.4 ", "1..2.3"],
    "ipv6": [":::", "1::2::3", "1:2:3:4:5:6:7", "1:2:3:4:5:6:7:8:9", "12345::", "::g", "::1%a", "1:2:3:4:5:6:7:8::"],
    "hostname": ["", "-a", "a-", "a..b", ".a", "a.", "a_b", "a" * 64, "xn--x", "é"],
    "idn-hostname": ["", "-a"],
    "email": ["a", "@b", "a@", ".a@b.c", "a..b@c.d", "a b@c.d", "a@-b.c", "a@b@c"],
    "idn-email": ["a", "@b"],
    "uri": ["", "//a", "/a", "a b:c", "http://a b", "1a:b", "http://a/%zz", "http://a/<>", "http://a:b/", "a:é"],
    "uri-reference": ["a b", "\\a", "1:2", "%", "#a#b", "[a]"],
    "iri": ["/é", "a:é b", "a:\ue000"],
    "iri-reference": ["é é", "<"],
    "json-pointer": ["a", "/~", "/~2", "#/a"],
    "relative-json-pointer": ["", "01", "-1", "/a", "1a", "0##"],
    "uri-template": ["{", "}", "{}", "a b", "{x", "{x:0}", "{x**}", "{x,}", "{!x}", "<", "%2"],
    "regex": [
        "(",
        ")",
        "[",
        "a)",
        "*",
        "a**",
        "[z-a]",
        "\\",
        "a{2",
        "(?:",
        "[]",
        "?",
        "a{3,1}",
        "a{10,9}",
        "(?=a)*",
        "$*",
        r"[\w-a]",
        "[^]",
        "[f-a]",
        r"[\x30-\x2f]",
        r"\ud800",
        r"\-",
        "a{1,3}{2}",
        "}",
        r"\1",
        "(?<=a*)b",
        "(?i)a",
        "(?=a",
    ],
    "url": ["", "/a", "a b:c", "http://a b"],
    "multi-host-uri": ["", "a", "://h", "a://", "a://h,", "a:b"],
    **{f"uuid{v}": ["", f"f47ac10b-58cc-{v}372-c567-0e02b2c3d479", f"{v}" * 32] for v in range(1, 9)},
    "byte": ["A", "QQ", "QQ=", "QR==", "QUK=", "QUJD=", "=", "Q Q=", "--__", "QQ==QQ=="],
    "base64": ["A", "QQ", "QQ=", "QR==", "QUK=", "QUJD=", "=", "Q Q=", "--__", "QQ==QQ=="],
    "base64url": ["A", "QQ", "QQ=", "QR==", "QUJD=", "++//"],
    "decimal": ["", "-", "01", "1.", ".5", "1e3", "+1", "NaN", "1,0"],
    "fraction": ["", "1/0", "1/", "/2", "1/02", "1.5"],
    "name-email": ["", "a@b.c", "<a@b.c>", "A <a>", "A<a@b.c>"],
    "ipv4interface": ["1.2.3", "1.2.3.4/33", "1.2.3.4/", "1.2.3.4/01"],
    "ipv6interface": [":::", "::1/129", "::1/"],
    "ipv4network": ["192.0.2.5/24", "1.2.3.4/0", "10.0.0.1/8", "1.2.3.4/33"],
    "ipv6network": ["2001:db8::1/32", "::1/0", "::1/129"],
    "ipvanyaddress": ["", "1.2.3", "1::2::3", "1.2.3.4/32"],
    "ipvanyinterface": ["", "1.2.3.4/33", "::1/129"],
    "ipvanynetwork": ["", "192.0.2.5/24", "::1/0"],
}

UNJUDGED = {
    "multi-host-uri": MultiHostUrl,
    **{f"uuid{version}": lambda text, version=version: version_of(text) == version for version in range(1, 9)},
    "byte": lambda text: base64.b64encode(base64.b64decode(text, validate=True)).decode() == text,
    "base64": lambda text: base64.b64encode(base64.b64decode(text, validate=True)).decode() == text,
    "base64url": lambda text: base64.urlsafe_b64encode(base64.urlsafe_b64decode(text)).decode() == text,
    "decimal": decimal.Decimal,
    "fraction": fractions.Fraction,
    "name-email": lambda text: all(email.utils.parseaddr(text)) and "@" in text,
    "ipv4interface": ipaddress.IPv4Interface,
    "ipv6interface": ipaddress.IPv6Interface,
    "ipv4network": ipaddress.IPv4Network,
    "ipv6network": ipaddress.IPv6Network,
    "ipvanyaddress": ipaddress.ip_address,
    "ipvanyinterface": ipaddress.ip_interface,
    "ipvanynetwork": ipaddress.ip_network,
}
"""Formats that the validator does not know, each with another reader: it raises ValueError, or returns False."""


@pytest.fixture(scope="module")
def machines():
    return {name: regular.automaton(in_format(name)) for name in FORMATS}


def version_of(text):
    return uuid.UUID(text).version


class Reader:
    """A judge of the formats that the validator does not know."""

    def __init__(self, read):
        self.read = read

    def is_valid(self, text):
        try:
            return self.read(text) is not False
        except (ValueError, ArithmeticError):
            return False


def judge(name):
    if name == "url":
        name = "uri"
    if name in UNJUDGED:
        return Reader(UNJUDGED[name])
    return jsonschema_rs.validator_for({"format": name}, validate_formats=True)


def test_the_lists_of_examples_are_of_all_formats():
    assert GOOD.keys() == BAD.keys() == FORMATS.keys()


@pytest.mark.parametrize("name", FORMATS)
def test_good_examples_are_strings_of_the_format_and_bad_ones_are_not(machines, name):
    assert [text for text in GOOD[name] if not regular.accepts(machines[name], text)] == []
    assert [text for text in BAD[name] if regular.accepts(machines[name], text)] == []
    assert format_strings(name).among([*BAD[name], *GOOD[name]]) == tuple(GOOD[name])
    assert not all(map(judge(name).is_valid, BAD[name])), "the validator does not know this format"


@pytest.mark.parametrize("name", FORMATS)
def test_a_validator_finds_no_fault_in_random_strings_of_a_format_nor_in_changed_ones(machines, name):
    rng, valid = random.Random(name), judge(name)
    changed = 0
    for _ in range(600):
        text = drawn(in_format(name), rng)
        assert regular.accepts(machines[name], text)
        assert valid.is_valid(text), text
        at, new = rng.randrange(len(text) + 1), rng.choice("0129afTZ-:./%~@+# é")
        for other in (text[:at] + text[at + 1 :], text[:at] + new + text[at:], text[:at] + new + text[at + 1 :]):
            if regular.accepts(machines[name], other):
                changed += 1
                assert valid.is_valid(other), other
    assert changed > 20


def test_names_of_properties_may_have_a_format():
    language = json_schema('{"type": "object", "propertyNames": {"format": "date"}}', strict=True)
    assert matches(language, '{"2024-02-29": 1}')
    assert not matches(language, '{"2023-02-29": 1}')


def test_dates_are_the_days_of_the_calendar(machines):
    for year in (1, 4, 100, 400, 1600, 1899, 1900, 1904, 2000, 2023, 2024, 2100, 9996, 9999):
        texts = {f"{year:04}-{month:02}-{day:02}" for month in range(15) for day in range(34)}
        start = datetime.date(year, 1, 1).toordinal()
        days = {datetime.date.fromordinal(start + number) for number in range(366) if start + number < 3652060}
        wanted = {day.isoformat() for day in days if day.year == year}
        assert {text for text in texts if regular.accepts(machines["date"], text)} == wanted
    february = [f"{year:04}-02-29" for year in range(10_000)]
    leap = {
        text
        for text in february
        if int(text[:4]) and ((int(text[2:4]) and int(text[:4]) % 4 == 0) or int(text[:4]) % 400 == 0)
    }
    assert {text for text in february if regular.accepts(machines["date"], text)} == leap


def test_times_are_those_of_the_clock(machines):
    hours, sixties = ("{:02}:00:00Z", "00:00:00+{:02}:00"), ("00:{:02}:00Z", "00:00:{:02}Z", "00:00:00-00:{:02}")
    for pattern, count in [(hour, 24) for hour in hours] + [(sixty, 60) for sixty in sixties]:
        for number in range(100):
            text = pattern.format(number)
            assert regular.accepts(machines["time"], text) == (number < count), text
            assert regular.accepts(machines["date-time"], f"2024-01-01T{text}") == (number < count), text


def is_read(read, text):
    try:
        read(text)
    except ValueError:
        return False
    return True


def test_octets_of_ipv4_addresses_are_those_the_standard_library_reads(machines):
    for number in (*map(str, range(300)), "00", "01", "001", "", " 1", "1e1", "٣"):
        for text in (f"{number}.0.0.1", f"1.2.3.{number}"):
            assert regular.accepts(machines["ipv4"], text) == is_read(ipaddress.IPv4Address, text), text


def test_ipv6_addresses_are_those_the_standard_library_reads(machines):
    for size in range(1, 11):
        for groups in itertools.product(("", "a0"), repeat=size):
            text = ":".join(groups)
            assert regular.accepts(machines["ipv6"], text) == is_read(ipaddress.IPv6Address, text), text
    for group in ("0", "ffff", "FFFF", "00000", "fffff", "g", "-1"):
        text = f"1::{group}"
        assert regular.accepts(machines["ipv6"], text) == is_read(ipaddress.IPv6Address, text), text


def test_uuids_are_those_the_standard_library_writes(machines):
    rng = random.Random(0)
    for _ in range(50):
        text = str(uuid.UUID(int=rng.getrandbits(128)))
        assert regular.accepts(machines["uuid"], text)
        assert regular.accepts(machines["uuid"], text.upper())


@pytest.mark.parametrize("name", ["Date", "", "color", "path", "password", "binary", "int32", "x" * 1000])
def test_any_other_format_is_an_annotation_to_us_and_to_the_judge(name):
    schema = json.dumps({"type": "string", "format": name})
    assert json_schema(schema, strict=True) == json_schema('{"type": "string"}', strict=True)
    assert judge(name).is_valid("((%%\\ {")


def test_what_the_judge_knows_as_a_format_is_never_an_annotation_to_us():
    drafts = (jsonschema_rs.Draft4Validator, jsonschema_rs.Draft7Validator, jsonschema_rs.Draft202012Validator)
    judged = {
        name
        for name in [*FORMATS, *KNOWN_ELSEWHERE]
        for draft in drafts
        if not draft({"format": name}, validate_formats=True).is_valid("((%%\\ {")
    }
    assert len(judged) == 19
    assert judged <= FORMATS.keys()


@pytest.mark.parametrize("draft", ["draft-06", "draft-07"])
def test_base64_content_is_enforced_in_the_drafts_whose_judge_asks_for_it(draft):
    schema = {"$schema": f"http://json-schema.org/{draft}/schema#", "type": "string", "contentEncoding": "base64"}
    assert not jsonschema_rs.validator_for(schema).is_valid("QR==")
    language = json_schema(json.dumps(schema), strict=True)
    assert language == json_schema('{"type": "string", "format": "base64"}', strict=True)


def test_python_reads_random_regexes_and_changed_ones(machines):
    rng, changed = random.Random("re"), 0
    for _ in range(400):
        text = drawn(in_format("regex"), rng)
        assert is_pattern_of_re(text), text
        for other in changes(text, rng):
            if regular.accepts(machines["regex"], other):
                changed += 1
                assert is_pattern_of_re(other), other
    assert changed > 200


def test_nearly_every_pattern_of_real_schemas_is_a_regex_if_python_and_the_validator_read_it(machines):
    patterns = {pattern for text in corpus().values() for pattern in patterns_in(json.loads(text))}
    known = [text for text in patterns if is_pattern_of_re(text) and judge("regex").is_valid(text)]
    assert len(known) > 900
    assert sum(regular.accepts(machines["regex"], text) for text in known) > 0.95 * len(
        known
    )  # of others ECMA-262 knows no escape
