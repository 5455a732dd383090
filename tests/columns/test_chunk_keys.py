"""Ints that fall into a key group of choice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aioflow.columns.hash_join import int_in_group
from aioflow.core.keygroups import MAX_PARALLELISM_LIMIT, key_group, key_groups


@given(st.integers(1, 2**70), st.integers(1, MAX_PARALLELISM_LIMIT), st.data())
def test_an_int_is_of_the_group_that_was_asked_for(
    number: int, max_parallelism: int, data: st.DataObject
) -> None:
    group = data.draw(st.integers(0, max_parallelism - 1))

    found = int_in_group(number, group)

    assert key_group(found, max_parallelism) == group
    assert key_groups([found], max_parallelism) == [group]


def test_each_number_and_group_has_an_int_of_its_own() -> None:
    found = {int_in_group(number, group) for number in range(1, 400) for group in range(128)}

    assert len(found) == 399 * 128
