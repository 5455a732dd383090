"""Structs of the program that is submitted: in the worker they are what they were where they
were written.
"""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import msgspec
import pytest

import aioflow as af
from aioflow.cluster.shipping import load_job, ship_job
from aioflow.graph.job_graph import build_job_graph
from aioflow.task.environment import TaskOptions

PROGRAM = """
from typing import ClassVar, Generic, TypeVar
import msgspec

T = TypeVar("T")

class Base(msgspec.Struct, frozen=True):
    a: int
    b: str = "q"

class Row(Base, frozen=True, kw_only=True, rename="camel", tag="row", order=True, array_like=False,
          forbid_unknown_fields=True):
    limit: ClassVar[int] = 9
    first_name: str
    more: list = msgspec.field(default_factory=list)
    rank: int = msgspec.field(default=3, name="RANK")

    def twice(self) -> "Row":
        return Row(2 * self.a, first_name=self.first_name)

class Empty(msgspec.Struct):
    pass

class Box(msgspec.Struct, Generic[T], array_like=True):
    inside: T

class Node(msgspec.Struct):
    n: int
    before: "Node | None" = None

    def __post_init__(self) -> None:
        self.n += 100

class Leaf(Node):
    size: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.size += 1

class Plain(Leaf):
    pass

class Tagged(msgspec.Struct, tag="b", tag_field="kind"):
    n: int

class Untagged(Tagged, tag=False):
    pass

class Again(Tagged):
    pass

classes = [Base, Row, Empty, Box, Node, Leaf, Plain, Tagged, Untagged, Again]
"""


def shipped(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A job whose function holds all these classes, written by the program in which they are
    defined.
    """
    program = ModuleType("__main__")
    exec(compile(PROGRAM, "<program>", "exec", dont_inherit=True), vars(program))
    monkeypatch.setitem(sys.modules, "__main__", program)
    flow = af.Flow("structs")
    flow.source([1]).map(lambda n, classes=program.classes: len(classes)).sink(print)
    return ship_job(build_job_graph(flow.graph, apart=True), TaskOptions())


def there(content: bytes, *expressions: str) -> list[str]:
    """The values of these names in a process that has the job from its bytes alone."""
    code = (
        "import gc, sys, inspect, msgspec\nfrom aioflow.cluster.shipping import load_job\njob = "
        "load_job(sys.stdin.buffer.read())\n"
    )
    code += (
        "globals().update({c.__name__: c for c in gc.get_objects() if isinstance(c, type) and "
        "c.__module__ == '__main__'})\n"
    )
    code += "".join(f"print({expression})\n" for expression in expressions)
    done = subprocess.run(
        [sys.executable, "-c", code], input=content, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().splitlines()


def test_a_struct_of_the_program_has_its_fields_and_options_on_arrival(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content = shipped(monkeypatch)
    assert there(
        content,
        "Base(1), hash(Base(1)) == hash(Base(1))",
        "Row(2, first_name='x').twice(), Row.limit, Row(1, first_name='x') < Row(2, "
        "first_name='x')",
        "Row(1, first_name='x').more is not Row(1, first_name='x').more",
        "msgspec.json.encode(Row(1, first_name='x')).decode()",
        'msgspec.json.decode(b\'{"type":"row","a":1,"firstName":"y","RANK":5}\', type=Row)',
        "inspect.signature(Row)",
        "Empty(), Box[int](7), msgspec.json.encode(Box(7)).decode()",
    ) == [
        "Base(a=1, b='q') True",
        "Row(a=4, b='q', first_name='x', more=[], rank=3) 9 True",
        "True",
        '{"type":"row","a":1,"b":"q","firstName":"x","more":[],"RANK":3}',
        "Row(a=1, b='q', first_name='y', more=[], rank=5)",
        "(a: int, b: str = 'q', *, first_name: str, more: list = <factory>, rank: int = 3)",
        "Empty() Box(inside=7) [7]",
    ]


def test_post_init_of_a_struct_of_the_program_runs_on_arrival(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may refer to its own class, so it cannot travel ahead of the fields."""
    content = shipped(monkeypatch)
    assert there(content, "Node(1, Node(2))", "Leaf(1)", "Plain(1)") == [
        "Node(n=101, before=Node(n=102, before=None))",
        "Leaf(n=101, before=None, size=2)",
        "Plain(n=101, before=None, size=2)",
    ]


def test_a_struct_that_is_not_tagged_as_its_base_is_not_tagged_on_arrival(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content = shipped(monkeypatch)
    assert there(
        content,
        *(f"msgspec.json.encode({name}(1)).decode()" for name in ("Tagged", "Untagged", "Again")),
    ) == [
        '{"kind":"b","n":1}',
        '{"n":1}',
        '{"kind":"b","n":1}',
    ]


def test_a_program_that_sends_jobs_to_itself_keeps_its_structs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content = shipped(monkeypatch)
    program = sys.modules["__main__"]
    load_job(content)
    assert repr(program.Leaf(1)) == "Leaf(n=101, before=None, size=2)"
    assert program.Row(1, first_name="x").twice() == program.Row(2, first_name="x")
    assert msgspec.json.decode(b'{"a":4}', type=program.Base) == program.Base(4)
