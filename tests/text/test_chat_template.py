"""`--chat-template`: the names of the documented launch commands, or a file."""

import pytest

from tureen.errors import StartupError
from tureen.text.chat_template import check_chat_template


@pytest.mark.parametrize("given", [None, "vicuna_v1.1", "chatml-llava"])
def test_the_documented_names_are_known(given):
    check_chat_template(given)


@pytest.mark.parametrize("given", ["vicuna", "Vicuna_v1.1", "", "chatml-llava.json", "x" * 500])
def test_other_names_are_refused_with_those_that_are_known(given):
    with pytest.raises(
        StartupError, match=r"--chat-template .*use chatml-llava, vicuna_v1.1 or a .jinja file"
    ) as error:
        check_chat_template(given)
    assert len(error.value.message) < 200


def test_a_file_must_be_there(tmp_path):
    file = tmp_path / "own.jinja"
    with pytest.raises(StartupError, match="no such file"):
        check_chat_template(str(file))
    file.write_text("{{ messages }}")
    check_chat_template(str(file))
