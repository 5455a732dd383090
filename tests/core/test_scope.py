"""The place of running user code, as a context variable: job, operator, subtask and key, computed
only on demand.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from aioflow.core.scope import Scope, current_scope, enter_scope, leave_scope
from aioflow.state.backend import NO_KEY


def operator_context(name: str, key: Any = NO_KEY, *, keyed: bool = True) -> Any:
    return SimpleNamespace(
        name=name,
        runtime=SimpleNamespace(subtask_index=1, parallelism=4),
        keyed_state=SimpleNamespace(current_key=key) if keyed else None,
    )


def test_there_is_no_scope_outside_of_a_flow() -> None:
    assert current_scope() is None


def test_a_scope_follows_the_operator_and_its_key() -> None:
    scope = Scope("wordcount")
    token = enter_scope(scope)
    try:
        assert (scope.job, scope.operator, scope.subtask, scope.key) == (
            "wordcount",
            None,
            None,
            None,
        )
        context = operator_context("count")
        scope.operator_context = context
        assert current_scope() is scope
        assert (scope.operator, scope.subtask, scope.key, repr(scope)) == (
            "count",
            "2/4",
            None,
            "wordcount/count[2/4]",
        )
        context.keyed_state.current_key = "hello"
        assert (scope.key, repr(scope)) == ("hello", "wordcount/count[2/4] key='hello'")
        scope.operator_context = operator_context("map", keyed=False)
        assert scope.key is None
    finally:
        leave_scope(token)
    assert current_scope() is None


async def test_a_task_inherits_the_scope_and_may_have_its_own() -> None:
    scope = Scope("job", operator_context("chain"))
    own = scope.at(operator_context("enrich", keyed=False))

    async def inherit() -> Scope | None:
        return current_scope()

    async def enter() -> Scope | None:
        enter_scope(own)
        await asyncio.sleep(0)
        return current_scope()

    token = enter_scope(scope)
    try:
        assert await asyncio.gather(
            asyncio.create_task(inherit()), asyncio.create_task(enter())
        ) == [scope, own]
        assert current_scope() is scope
    finally:
        leave_scope(token)
    assert (own.job, own.operator) == ("job", "enrich")
