import pytest

from tureen.cache.pages import PagePool


def test_a_page_is_free_again_when_its_last_holder_gives_it_back():
    pool = PagePool(2)
    page = pool.take()
    pool.share(page)
    assert (pool.count(page), len(pool.free)) == (2, 1)
    assert pool.give_back(page) == 1
    assert len(pool.free) == 1
    assert pool.give_back(page) == 0
    assert len(pool.free) == 2


def test_every_page_is_handed_out_once():
    pool = PagePool(5)
    assert sorted(pool.take() for _ in range(5)) == list(range(5))
    with pytest.raises(IndexError):
        pool.take()


def test_a_page_cannot_be_given_back_twice():
    pool = PagePool(1)
    page = pool.take()
    pool.give_back(page)
    with pytest.raises(RuntimeError, match="given back more often"):
        pool.give_back(page)
    assert pool.check([0]) == []


def test_a_free_page_cannot_be_shared():
    with pytest.raises(RuntimeError, match="is free"):
        PagePool(1).share(0)


def test_the_check_names_the_page_whose_count_is_wrong():
    pool = PagePool(3)
    page = pool.take()
    assert pool.check([1, 0, 0]) == []
    assert any(f"page {page}" in complaint for complaint in pool.check([0, 0, 0]))
    assert any("free list" in complaint for complaint in pool.check([1, 1, 0]))
