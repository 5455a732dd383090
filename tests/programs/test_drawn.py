"""Everything that the public API offers for flows is drawn, or left out with a reason."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, wraps
from pathlib import Path
from typing import Any, get_overloads

import pytest

import aioflow as af
from aioflow.api import streams
from tests.programs import run, worlds
from tests.programs.draw import draw
from tests.programs.model import STEPS
from tests.programs.program import SQL, Program
from tests.programs.run import build_of

SEEDS = range(250)
CLASSES: tuple[type, ...] = (
    streams.DataStream,
    streams.KeyedStream,
    streams.ConnectedStreams,
    streams.WindowedStream,
    streams.WindowResults,
    streams._TwoStreams,
    streams.JoinedStreams,
    streams.CoGroupedStreams,
    streams.IntervalJoin,
)
INTERNAL = "is for the package itself"
ENDS = "runs a flow; the ways call collect and execute_and_collect of what is drawn"
LEFT_OUT = {
    "DataStream.upserts": "needs changes of a database, and stands on their source",
    "DataStream.flow": INTERNAL,
    "DataStream.upstreams": INTERNAL,
    "KeyedStream.has_event_time": INTERNAL,
    "WindowedStream.counting": INTERNAL,
    "DataStream.explain": "gives a text, which has tests of its own",
    "DataStream.print": "is a sink to standard output; the sinks are part of a way",
    "DataStream.sink": "is part of a way: connectors that commit, or a sink that gathers",
    "DataStream.collect": ENDS,
    "DataStream.execute_and_collect": ENDS,
    "DataStream.to_arrow": ENDS,
    "DataStream.to_pandas": ENDS,
    "DataStream.to_polars": ENDS,
    "_TwoStreams.window(trigger)": "the documents do not say which pairs a second firing gives",
    "_TwoStreams.window(evictor)": "the documents do not say what is evicted of two sides",
}
"""Methods `Class.method`, options `Class.method(option)`, and why no program has them."""


@cache
def programs() -> list[Program]:
    return [draw(seed) for seed in SEEDS]


OF_ANY = frozenset({"name", "uid", "parallelism"})
"""Options of any operator; drawn for all kinds alike."""


def public(cls: type) -> Iterator[str]:
    return (name for name in vars(cls) if not name.startswith("_") and name not in ANNOTATIONS)


ANNOTATIONS = frozenset({"completed_by", "elsewhere", "kind", "takes", "operator"})


def options_of(method: Any) -> set[str]:
    """The names of the keyword-only parameters of a method, over its overloads."""
    forms = get_overloads(inspect.unwrap(method)) or [method]
    return {
        name
        for form in forms
        for name, parameter in inspect.signature(form).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name not in OF_ANY
    }


def test_a_seed_is_one_program_and_all_operators_are_drawn() -> None:
    assert draw(7).text == draw(7).text
    kinds = Counter(step.kind for program in programs() for step in program.steps)
    assert set(kinds) == set(STEPS)
    queries = {step.args["query"] for p in programs() for step in p.steps if step.kind == "sql"}
    assert queries == set(SQL)


def test_every_method_and_option_of_streams_is_drawn_or_left_out_with_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offered, used = set[str](), set[str]()

    def noting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any, **given: Any) -> Any:
            used.update([name, *(f"{name}({option})" for option in given)])
            return method(*args, **given)

        return call

    for cls in CLASSES:
        for name in public(cls):
            full, found = f"{cls.__name__}.{name}", vars(cls)[name]
            offered.add(full)
            if isinstance(found, property):
                assert found.fget is not None
                monkeypatch.setattr(cls, name, property(noting(full, found.fget)))
            elif inspect.isfunction(found):
                offered |= {f"{full}({option})" for option in options_of(found)}
                monkeypatch.setattr(cls, name, noting(full, found))
    for program in programs():
        build_of(program)(3 if program.spread else 1)
    missing = {
        one
        for one in offered - used
        if one not in LEFT_OUT and one.partition("(")[0] not in LEFT_OUT
    }
    assert missing == set()
    assert set(LEFT_OUT) <= offered


STRATEGIES_LEFT_OUT = {
    "ingestion_time": "has the times of the machine, which the model does not know",
}
"""Constructors of strategies that no program has, and why."""


def test_every_strategy_and_option_of_watermarks_is_drawn_or_left_out_with_a_reason() -> None:
    text = "\n".join(program.text for program in programs())
    methods = {
        name: method for name, method in vars(af.WatermarkStrategy).items() if name[0] != "_"
    }
    made = {name for name, one in methods.items() if isinstance(one, staticmethod)}
    made |= {name for name in methods if name.startswith("with_")}
    assert {name for name in made if f"{name}(" not in text} == set(STRATEGIES_LEFT_OUT)
    options = {
        option for name in made for option in options_of(getattr(af.WatermarkStrategy, name))
    }
    assert {option for option in options if f"{option}=" not in text} == set()


PLACE = "is about where a flow runs"
RESTART = "decides when a job restarts; the ways take one policy, and the others have tests"
NAMES_LEFT_OUT = {
    "Function": "is a base without a method for elements",
    "configured": PLACE,
    "current_scope": "is for logs",
    "failure_rate": RESTART,
    "no_restart": RESTART,
    "io": "is the package of connectors",
    "monitor_app": PLACE,
    "register_type": "is for types that nothing here can name",
    "run": PLACE,
    "testing": "is the package for tests",
    "tune_gc": PLACE,
}
"""Functions and bases of functions in `aioflow`, and why no program has them."""


def test_every_function_for_flows_is_drawn_or_left_out_with_a_reason() -> None:
    texts = [program.text for program in programs()]
    texts += [path.read_text("utf-8") for path in Path(__file__).parent.glob("*.py")]
    used = set(re.findall(r"\baf\.(\w+)", "\n".join(texts)))
    offered = {
        name
        for name in {*af.__all__, "sum", "min", "max"}
        if name[0].islower() or name.endswith(("Function", "Descriptor", "Ttl", "Strategy"))
    }
    assert offered - used - set(NAMES_LEFT_OUT) == set()
    assert set(NAMES_LEFT_OUT) <= offered - used | {"io"}


OPTIONS_LEFT_OUT = {
    "restore": "is the default, which goes on from the newest",
    "fresh": "drops state, and with it elements",
    "allow_non_restored": "drops state, and with it elements",
    "monitor": PLACE,
    "monitor_options": PLACE,
    "stop_timeout": "cuts off what takes longer, which depends on the machine",
    "cancellation_timeout": "cuts off what takes longer, which depends on the machine",
    "subscribe": "is for subscriptions, which may miss elements over a restart",
}
"""Options of a run, and why no way draws them."""


def test_every_option_of_a_run_is_drawn_or_left_out_with_a_reason() -> None:
    text = "".join(Path(module.__file__ or "").read_text("utf-8") for module in (run, worlds))
    used = {
        name for name in af.RunArguments.__annotations__ if re.search(rf'"{name}"|\b{name}=', text)
    }
    assert set(af.RunArguments.__annotations__) - used == set(OPTIONS_LEFT_OUT)
