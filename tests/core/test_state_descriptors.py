"""Descriptors are made as users write them: plain, and with the types spelled out."""

from __future__ import annotations

import pytest

from aioflow.core.errors import GraphError
from aioflow.core.states import (
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    ValueStateDescriptor,
)


@pytest.mark.parametrize(
    ("spelled_out", "plain"),
    [
        (lambda: ValueStateDescriptor[int]("n", default=0), ValueStateDescriptor("n", default=0)),
        (lambda: ListStateDescriptor[str]("n"), ListStateDescriptor("n")),
        (lambda: MapStateDescriptor[str, int]("n", ttl="1d"), MapStateDescriptor("n", ttl="1d")),
        (lambda: ReducingStateDescriptor[int]("n", max), ReducingStateDescriptor("n", max)),
    ],
)
def test_a_descriptor_with_its_types_spelled_out_equals_the_plain_one(spelled_out, plain) -> None:
    assert spelled_out() == plain


@pytest.mark.parametrize("wrong", [lambda: 0, lambda old: old, lambda old, added, more: old])
def test_a_reducing_state_takes_a_function_of_two(wrong) -> None:
    with pytest.raises(
        GraphError,
        match=(
            r"^ReducingStateDescriptor\('n'\) needs a function of "
            r"\(old, added\), got .*<lambda>\("
        ),
    ):
        ReducingStateDescriptor("n", wrong)
