import os

import process_state
import pytest
import torch

pytest_plugins = ["pytester"]


def test_what_was_changed_is_named_and_put_back(monkeypatch, tmp_path):
    monkeypatch.setenv("TUREEN_LEFT", "before")
    monkeypatch.delenv("TUREEN_NEW", raising=False)
    before, threads, folder = process_state.read(), torch.get_num_threads(), os.getcwd()
    torch.set_num_threads(threads + 1)
    os.environ.update(TUREEN_LEFT="after", TUREEN_NEW="1")
    os.chdir(tmp_path)
    found = process_state.changes(before, process_state.read())
    process_state.restore(before)
    assert [line.split(":")[0] for line in found] == [
        "os.environ['TUREEN_LEFT']",
        "os.environ['TUREEN_NEW']",
        "os.getcwd()",
    ]
    assert "'TUREEN_LEFT']: before before, after after" in found[0]
    assert (torch.get_num_threads(), os.getcwd(), os.environ["TUREEN_LEFT"]) == (threads, folder, "before")
    assert process_state.changes(before, process_state.read()) == []


def test_that_torch_was_imported_is_no_change():
    assert process_state.changes({}, {"torch.get_num_threads()": 2}) == []


HOOKS = """
import importlib.util
spec = importlib.util.spec_from_file_location("house", {path!r})
house = importlib.util.module_from_spec(spec)
spec.loader.exec_module(house)
pytest_addoption, pytest_collection_modifyitems = house.pytest_addoption, house.pytest_collection_modifyitems
pytest_runtest_setup, pytest_runtest_teardown = house.pytest_runtest_setup, house.pytest_runtest_teardown
"""


@pytest.fixture
def house(pytester):
    """A folder of tests with the hooks of ours."""
    pytester.makeconftest(
        HOOKS.format(path=str(pytest.importorskip("process_state").__file__).replace("process_state", "conftest"))
    )
    return pytester


def test_threads_of_torch_that_a_test_changes_are_set_back_for_the_next(house):
    house.makepyfile(
        """
        import torch

        THREADS = torch.get_num_threads()

        def test_first():
            torch.set_num_threads(THREADS + 1)

        def test_second():
            assert torch.get_num_threads() == THREADS
        """
    )
    result = house.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=2)


def test_the_log_that_a_command_sets_up_is_set_back_for_the_next_test(house):
    house.makepyfile(
        """
        import logging

        from tureen.log import TextFormatter, set_up_logging

        def test_first():
            set_up_logging("debug", "text")

        def test_second():
            assert not any(isinstance(one.formatter, TextFormatter) for one in logging.getLogger().handlers)
            assert logging.getLogger("tureen").level == logging.NOTSET
        """
    )
    result = house.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=2)


def test_a_test_that_leaves_a_variable_behind_fails_and_the_next_one_does_not(house):
    house.makepyfile(
        """
        import os

        def test_first():
            os.environ["TUREEN_LEFT"] = "1"

        def test_second():
            assert "TUREEN_LEFT" not in os.environ
        """
    )
    result = house.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*leaves behind: os.environ*TUREEN_LEFT*"])


def test_a_seed_gives_one_order_of_tests(house):
    house.makepyfile("import pytest\n\n@pytest.mark.parametrize('i', range(20))\ndef test_one(i): pass")
    orders = []
    for seed in ("1", "1", "2"):
        lines = house.runpytest_inprocess("--collect-only", "-q", "--shuffle", seed).outlines
        orders.append([line for line in lines if "::" in line])
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])
    assert orders[0] != sorted(orders[0], key=lambda line: int(line.split("[")[1][:-1]))
