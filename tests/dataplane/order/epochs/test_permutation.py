from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data.plain_order import image

from headrace.dataplane.order.epochs.permutation import derive_key, derive_keys, invert, permute


@given(length=st.integers(1, 3000), seed=st.integers(0, 2**63))
@settings(max_examples=60, deadline=None)
def test_every_image_occurs_once(length: int, seed: int) -> None:
    image = permute(derive_key(seed), length, np.arange(length))
    assert sorted(image.tolist()) == list(range(length))


@given(length=st.integers(2, 10**13), data=st.data())
@settings(max_examples=60, deadline=None)
def test_an_image_does_not_depend_on_the_other_positions(length: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=20))
    keys = derive_key("x", length)
    together = permute(keys, length, np.array(positions))
    alone = [int(permute(keys, length, np.array([p]))[0]) for p in positions]
    assert together.tolist() == alone
    assert all(0 <= image < length for image in alone)


@given(length=st.integers(1, 10**13), data=st.data())
@settings(max_examples=100, deadline=None)
def test_invert_is_the_inverse_of_permute(length: int, data: st.DataObject) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=20)))
    keys = derive_key("y", length)
    assert invert(keys, length, permute(keys, length, positions)).tolist() == positions.tolist()
    assert permute(keys, length, invert(keys, length, positions)).tolist() == positions.tolist()


def test_different_keys_give_different_permutations() -> None:
    positions = np.arange(1000)
    images = [
        permute(derive_key(*parts), 1000, positions) for parts in ((1, "a"), (1, "b"), (2, "a"))
    ]
    for left, right in ((0, 1), (0, 2), (1, 2)):
        assert (images[left] != images[right]).mean() > 0.98
    # Keys separate their parts: ("ab", "c") differs from ("a", "bc").
    assert derive_key("ab", "c").tolist() != derive_key("a", "bc").tolist()


@pytest.mark.parametrize("length", [24, 1000, 4096])
def test_images_are_uniform(length: int) -> None:
    """Over many keys the images of each position are uniform: chi-square within six sigma."""
    trials = 400
    counts = np.zeros((length, 8))
    rows = np.arange(length)
    for seed in range(trials):
        counts[rows, permute(derive_key(seed), length, rows) * 8 // length] += 1
    expected = np.bincount(rows * 8 // length, minlength=8) / length * trials
    chi = ((counts - expected) ** 2 / expected).sum()
    freedom = 7 * length
    assert abs(chi - freedom) < 6 * np.sqrt(2 * freedom)


def test_images_of_neighbours_are_uncorrelated() -> None:
    image = permute(derive_key("n"), 10**6, np.arange(20_000))
    assert abs(np.corrcoef(image[:-1], image[1:])[0, 1]) < 0.03


def test_the_permutation_is_the_recorded_one() -> None:
    """A change here changes the order of every run and needs a new plan version."""
    assert permute(derive_key(7, "web", 0, -1), 10, np.arange(10)).tolist() == GOLDEN


GOLDEN = [7, 6, 1, 9, 2, 3, 0, 8, 4, 5]


@given(st.lists(st.tuples(st.integers(1, 10**13), st.floats(0, 1)), min_size=1, max_size=40))
@settings(max_examples=100, deadline=None)
def test_images_under_many_permutations_are_those_under_each(
    cases: list[tuple[int, float]],
) -> None:
    """Also those of an implementation in Python's integers."""
    names = [(number % 7, "web", number, -1) for number in range(len(cases))]
    lengths = np.array([length for length, _ in cases])
    positions = np.array([int(share * (length - 1)) for length, share in cases])
    images = permute(derive_keys(names), lengths, positions)
    assert invert(derive_keys(names), lengths, images).tolist() == positions.tolist()
    for name, length, position, result in zip(
        names, lengths.tolist(), positions.tolist(), images.tolist(), strict=True
    ):
        assert result == permute(derive_key(*name), length, np.array([position]))[0]
        assert result == image([*name], length, position)
