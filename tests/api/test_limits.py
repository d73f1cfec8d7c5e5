"""Every list and map of every body has a declared limit. tests/ledgers/api checks what refusing costs."""

import msgspec
import pytest
from body_limits import BODIES, places

from tureen.http.dialect import Entry


@pytest.mark.parametrize(("entry", "body"), BODIES)
def test_every_list_and_map_says_how_many_entries_it_takes(entry: Entry, body: type[msgspec.Struct]):
    assert [place.path for place in places(entry, body) if place.most is None] == []
