import numpy as np
import pytest
from scipy import stats

from tureen.sampling.random import philox4x32, uniform

# Known answers of the Random123 distribution (kat_vectors): counter, key, output.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def _words(text):
    return [int(word, 16) for word in text.split()]


def _philox_in_plain_integers(counter, key):
    counter, key = list(counter), list(key)
    for round_number in range(10):
        if round_number:
            key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
        high0, low0 = divmod(0xD2511F53 * counter[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * counter[2], 2**32)
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
    return counter


def _philox(counters, keys):
    """For arrays [n, 4] and [n, 2], giving [n, 4]."""
    return np.stack(philox4x32(tuple(counters.T), tuple(keys.T)), axis=1)


def test_the_generator_gives_the_published_answers():
    counters, keys, outputs = (np.array([_words(row[i]) for row in KNOWN], dtype=np.uint64) for i in range(3))
    assert np.array_equal(_philox(counters, keys), outputs)
    for counter, key, output in zip(counters.tolist(), keys.tolist(), outputs.tolist(), strict=True):
        assert list(philox4x32(tuple(counter), tuple(key))) == output


def test_the_generator_equals_one_written_with_plain_integers():
    rng = np.random.default_rng(0)
    counters = rng.integers(0, 2**32, (200, 4), dtype=np.uint64)
    keys = rng.integers(0, 2**32, (200, 2), dtype=np.uint64)
    expected = [_philox_in_plain_integers(c, k) for c, k in zip(counters.tolist(), keys.tolist(), strict=True)]
    assert _philox(counters, keys).tolist() == expected


@pytest.mark.parametrize(
    ("seed", "position"), [(0, 0), (1, 7), (-1, 3), (-(2**63), 2**40), (2**63 - 1, 1), (2**63 + 126, 0)]
)
def test_a_uniform_number_is_the_first_53_bits_of_counter_position_under_key_seed(seed, position):
    seed_words = [seed % 2**32, (seed >> 32) % 2**32]
    words = _philox_in_plain_integers([position % 2**32, position >> 32, 0, 0], seed_words)
    expected = ((words[0] << 32 | words[1]) >> 11) / 2**53
    assert uniform([seed], [position])[0] == expected
    for others in (2, 100):  # few numbers are computed in another way than many
        assert uniform([5, seed, *[9] * others], [1, position, *[2] * others])[1] == expected


def test_numbers_are_in_the_half_open_unit_interval_and_uniform():
    numbers = uniform([42] * 20_000, range(20_000))
    assert numbers.dtype == np.float64
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    assert stats.kstest(numbers, "uniform").pvalue > 0.001


def test_neighbouring_seeds_and_positions_are_unrelated():
    by_seed = uniform(range(20_000), [17] * 20_000)
    by_position = uniform([17] * 20_000, range(20_000))
    assert stats.kstest(by_seed, "uniform").pvalue > 0.001
    assert abs(np.corrcoef(by_seed[:-1], by_seed[1:])[0, 1]) < 0.03
    assert abs(np.corrcoef(by_seed, by_position)[0, 1]) < 0.03


def test_nothing_asked_gives_nothing():
    assert uniform([], []).shape == (0,)
