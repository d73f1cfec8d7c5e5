"""Code of another version of Python is refused by name, before anything is unpickled."""

from __future__ import annotations

import json
import sys

import pytest

from tureen.config import Config
from tureen.errors import InvalidRequest
from tureen.fields.processor import check_processor
from tureen.logit_processor import CustomLogitProcessor

HERE = "{}.{}".format(*sys.version_info)
CONFIG = Config(enable_custom_logit_processor=True)


class Mine(CustomLogitProcessor):
    """Does nothing."""

    def __call__(self, logits, custom_param_list):
        return logits


def _sent(**changes):
    return json.dumps(json.loads(Mine.to_str()) | changes)


def test_what_is_sent_says_which_python_made_it():
    assert json.loads(Mine.to_str())["python"] == HERE
    assert check_processor(_sent(), CONFIG, "custom_logit_processor")


def test_another_version_is_refused_by_name():
    with pytest.raises(InvalidRequest, match=rf"'3\.9'.*{HERE}"):
        check_processor(_sent(python="3.9"), CONFIG, "custom_logit_processor")


def test_sglang_s_form_which_names_no_version_is_taken():
    code = json.loads(Mine.to_str())["callable"]
    assert check_processor(json.dumps({"callable": code}), CONFIG, "custom_logit_processor")


@pytest.mark.parametrize("changes", [{"python": 3}, {"python": ["3.11"]}, {"other": 1}])
def test_another_form_is_refused(changes):
    with pytest.raises(InvalidRequest):
        check_processor(_sent(**changes), CONFIG, "custom_logit_processor")
