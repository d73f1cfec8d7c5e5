"""Formats against the standard library, a JSON schema validator, and lists of good and bad examples."""

from __future__ import annotations

import datetime
import ipaddress
import itertools
import random
import uuid

import jsonschema_rs
import pytest

from tureen.grammar import regular
from tureen.grammar.expression import Chain, Chars, Choice, GrammarError, Repeat, Text
from tureen.grammar.schema.formats import FORMATS, format_strings, in_format

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
}  # fmt: skip


@pytest.fixture(scope="module")
def machines():
    return {name: regular.automaton(in_format(name)) for name in FORMATS}


def judge(name):
    return jsonschema_rs.validator_for({"format": name}, validate_formats=True)


def test_the_lists_of_examples_are_of_all_formats():
    assert GOOD.keys() == BAD.keys() == FORMATS.keys()


@pytest.mark.parametrize("name", FORMATS)
def test_good_examples_are_strings_of_the_format_and_bad_ones_are_not(machines, name):
    assert [text for text in GOOD[name] if not regular.accepts(machines[name], text)] == []
    assert [text for text in BAD[name] if regular.accepts(machines[name], text)] == []
    assert format_strings(name).among([*BAD[name], *GOOD[name]]) == tuple(GOOD[name])
    assert not all(map(judge(name).is_valid, BAD[name])), "the validator does not know this format"


def drawn(node, rng):
    """A random string of the expression."""
    match node:
        case Text(text):
            return text
        case Chars(ranges):
            return chr(rng.randint(*rng.choice(ranges)))
        case Chain(items):
            return "".join(drawn(item, rng) for item in items)
        case Choice(items):
            return drawn(rng.choice(items), rng)
        case Repeat(item, least, most):
            most = least + 4 if most is None else most
            return "".join(drawn(item, rng) for _ in range(rng.choice([least, most, rng.randint(least, most)])))
    raise TypeError(node)


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


@pytest.mark.parametrize("name", ["regex", "Date", "", "uri-template", "x" * 1000])
def test_an_unknown_format_is_refused_by_name_with_a_list_of_the_known(name):
    with pytest.raises(GrammarError) as caught:
        format_strings(name)
    assert name[:20] in str(caught.value)
    assert all(known in str(caught.value) for known in FORMATS)
    assert len(str(caught.value)) < 500
