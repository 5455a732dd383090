"""A job on its way to another process: what travels, by name or by value, and what is refused
where.
"""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
import threading
from dataclasses import dataclass
from functools import cached_property, partial
from types import ModuleType
from typing import Any

import msgspec
import pytest

import aioflow as af
from aioflow.cluster import shipping
from aioflow.cluster.shipping import MSGSPEC_CACHE, load_job, local_job, ship_job
from aioflow.core.errors import GraphError
from aioflow.core.wire.serializers import Codec
from aioflow.graph.deployment import ExecutionAttemptId, TaskDeploymentDescriptor
from aioflow.graph.job_graph import JobGraph, build_job_graph
from aioflow.inspection import redaction
from aioflow.operators.source import Split
from aioflow.task.environment import TaskOptions


def graph_of(flow: af.Flow) -> JobGraph:
    return build_job_graph(flow.graph, apart=True)


def sample(keep: Any = None) -> JobGraph:
    flow = af.Flow("sample", parallelism=2)
    flow.source([1, 2, 3]).map(lambda n: n + 1, name="plus").key_by(lambda n: n % 2).count().sink(
        keep or print
    )
    return graph_of(flow)


def descriptor_of(graph: JobGraph, *splits: Split) -> TaskDeploymentDescriptor:
    vertex = graph.vertices[0]
    attempt = ExecutionAttemptId("j" * 32, vertex.id, 0, 0)
    return TaskDeploymentDescriptor(
        job_name="sample", attempt=attempt, vertex=vertex, inputs=(), outputs=(), splits=splits
    )


def test_a_graph_arrives_with_its_vertices_edges_and_names() -> None:
    graph = sample()
    job = load_job(ship_job(graph, TaskOptions()))

    assert [v.name for v in job.graph.vertices] == [v.name for v in graph.vertices]
    assert [(e.source, e.target, e.partitioning.strategy) for e in job.graph.edges] == [
        (e.source, e.target, e.partitioning.strategy) for e in graph.edges
    ]
    assert job.options == TaskOptions()


def test_a_job_refers_to_nothing_that_only_building_a_flow_needs() -> None:
    """A worker imports what its job refers to. Modules of the API import most operators."""
    flow = af.Flow("small")
    words = flow.source(["a", "b"]).filter(bool).map(str.upper)
    words.key_by(str.lower).count().sink(print)
    content = ship_job(graph_of(flow), TaskOptions())

    assert b"aioflow.operators.stateless" in content
    assert not [name for name in (b"aioflow.api", b"aioflow.operators.join") if name in content]


def test_hidden_values_of_a_job_are_hidden_where_it_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker knows no variables of a script, and its errors may show a URL with their values."""
    monkeypatch.setattr(redaction, "_hidden_values", ("canary-77aa", "of another job"))
    flow = af.Flow("hidden")
    flow.source(["row"]).map(lambda row: "http://host/canary-77aa").sink(print)
    content = ship_job(graph_of(flow), TaskOptions())
    monkeypatch.setattr(redaction, "_hidden_values", ())
    load_job(content)

    told = redaction.redacted("http://host/canary-77aa refused the row of another job")
    assert told == "http://host/*** refused the row of another job"


def test_local_operator_travels_as_a_name_only() -> None:
    lock = threading.Lock()
    job = load_job(ship_job(sample(lambda row: lock.locked()), TaskOptions()))

    stays = [node for vertex in job.graph.vertices for node in vertex.nodes if node.stays_here]
    assert stays
    assert all(node.factory is None and node.source is None for node in stays)


def test_a_task_shares_the_vertices_and_partitionings_of_its_job() -> None:
    graph = sample()
    here = local_job(graph, TaskOptions())
    there = load_job(ship_job(graph, TaskOptions()))
    descriptor = descriptor_of(graph)

    assert there.load_task(here.ship_task(descriptor)).vertex is there.graph.vertices[0]


def test_a_split_that_cannot_travel_is_refused_with_its_task() -> None:
    graph = sample()
    descriptor = descriptor_of(graph, Split("0", position=threading.Lock()))

    with pytest.raises(GraphError, match=r"cannot travel to a worker.*lock.*splits are plain data"):
        local_job(graph, TaskOptions()).ship_task(descriptor)


@pytest.mark.parametrize("what", ["map", "key"])
def test_a_function_that_cannot_be_pickled_is_named(what: str) -> None:
    lock = threading.Lock()
    flow = af.Flow("locked", parallelism=2)
    stream = flow.source([1]).map(
        (lambda n: lock.locked()) if what == "map" else (lambda n: n), name="looks"
    )
    stream.key_by((lambda n: lock.locked()) if what == "key" else (lambda n: n)).count(
        name="counts"
    ).sink(print)
    named = {"map": "operator 'looks'", "key": "the partitioning between '.*looks' and 'counts'"}[
        what
    ]

    with pytest.raises(GraphError, match=f"{named} cannot travel to a worker .*TypeError.*af.use"):
        ship_job(graph_of(flow), TaskOptions())


def test_a_job_that_is_too_large_names_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping, "JOB_BYTES_MAX", 100_000)
    flow = af.Flow("large")
    flow.source([b"x" * 200_000], name="blob").map(len, name="small").sink(print)

    with pytest.raises(
        GraphError, match=r"flow 'large' takes 20\d+ bytes.*operator 'blob' alone takes 20\d+"
    ):
        ship_job(graph_of(flow), TaskOptions())


class Money:
    def __init__(self, cents: int) -> None:
        self.cents = cents


def test_registered_types_travel_with_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's process has never run the line that registers them."""
    from aioflow.core.wire.types import TypeRegistry

    registry = TypeRegistry()
    registry.register(Money, "money", encode=lambda money: money.cents, decode=Money)
    monkeypatch.setattr(shipping, "DEFAULT_TYPES", registry)
    content = ship_job(sample(), TaskOptions())
    monkeypatch.setattr(shipping, "DEFAULT_TYPES", TypeRegistry())
    codec = Codec(load_job(content).types)

    assert codec.decode(codec.encode(Money(5), owner="test")).cents == 5


class Counter:
    def __init__(self) -> None:
        self.count = 0
        self.me = self

    def __call__(self, row: int) -> int:
        self.count += 1
        return row


@dataclass(frozen=True)
class Threshold:
    least: int = 3


class Shadowed:
    """A class whose attribute is hidden by a property of the same name."""

    def __init__(self) -> None:
        self.__dict__["rate"] = 5

    @property
    def rate(self) -> int:
        return -1

    @rate.setter
    def rate(self, value: int) -> None:
        raise AttributeError("cannot be set")


class Restored:
    def __init__(self) -> None:
        self.kept = 1

    def __setstate__(self, state: dict[str, int]) -> None:
        self.kept = state["kept"] + 1


class Lazy:
    @cached_property
    def twice(self) -> int:
        return 14


class Named(dict[str, int]):
    def __init__(self) -> None:
        super().__init__(one=1)
        self.name = "items"


def arrived(value: Any) -> Any:
    """`value` behind the way to a worker."""
    return pickle.loads(shipping._dumps(value, {}))


def test_objects_arrive_with_their_attributes_for_any_class() -> None:
    counter = Counter()
    counter.count = 7
    there = arrived(counter)
    assert there.count == 7
    assert there.me is there
    assert arrived(Threshold(9)) == Threshold(9)
    assert vars(arrived(Shadowed())) == {"rate": 5}
    assert arrived(Restored()).kept == 2
    named = arrived(Named())
    assert (named, named.name) == ({"one": 1}, "items")


def test_a_cached_property_travels_with_its_class() -> None:
    """Until Python 3.11 it has a lock."""
    there = arrived(vars(Lazy)["twice"])
    instance = type("Lazy", (), {"twice": there})()
    assert instance.twice == 14
    assert vars(instance) == {"twice": 14}


def test_attributes_of_a_function_object_are_as_near_in_the_worker_as_where_it_was_made() -> None:
    def keeps_a_dict(instance: object) -> bool:
        """Whether the collector sees a dict between the object and its attributes."""
        return any(type(held) is dict for held in gc.get_referents(instance))

    here, there = Counter(), arrived(Counter())

    assert keeps_a_dict(there) == keeps_a_dict(here)


def test_a_function_that_travels_by_value_keeps_the_name_of_its_file() -> None:
    """Tracebacks and the stack of a held loop show its lines. cloudpickle 3.1.3 leaves the name
    out.
    """
    function = arrived(lambda: None)

    assert function.__code__.co_filename == __file__


def test_modules_whose_functions_travel_by_value_are_imported_on_arrival(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "shipped_module.py").write_text("double = lambda n: n * 2\nclass Row: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import shipped_module  # type: ignore[import-not-found]

    anonymous = eval("lambda n: n", vars(shipped_module))
    flow = af.Flow("modules")
    flow.source([1]).map(partial(anonymous)).sink(print)
    content = ship_job(graph_of(flow), TaskOptions())
    monkeypatch.delitem(sys.modules, "shipped_module")
    load_job(content)

    assert isinstance(sys.modules.pop("shipped_module"), ModuleType)


def test_a_class_of_the_program_travels_when_values_of_it_were_made_from_rows_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """msgspec stores data in a class that cannot be pickled: a program that runs its flow twice
    would fail the second time.
    """
    for kind in ("class Row(NamedTuple):", "@dataclass\nclass Row:"):
        program = ModuleType("__main__")
        exec(
            f"from dataclasses import dataclass\nfrom typing import NamedTuple\n{kind}\n    n: int",
            vars(program),
        )
        monkeypatch.setitem(sys.modules, "__main__", program)
        assert (
            msgspec.convert({"n": 1}, program.Row)
            if "dataclass\n" in kind
            else msgspec.convert([1], program.Row)
        )
        flow = af.Flow("rows")
        flow.source([1]).map(program.Row).sink(print)

        job = load_job(ship_job(graph_of(flow), TaskOptions()))

        assert [vertex.name for vertex in job.graph.vertices]
        assert MSGSPEC_CACHE in vars(program.Row), "another thread may need it just then"


def test_a_dataclass_of_the_program_keeps_what_it_needs_on_arrival(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sentinel marks a field without default.

    A copy of the sentinel would count as the default, and pass for a value of the field.
    """
    program = ModuleType("__main__")
    fields = "a: str; n: int; more: list = field(default_factory=list)"
    exec(
        f"from dataclasses import dataclass, field\n@dataclass\nclass Row: {fields}", vars(program)
    )
    monkeypatch.setitem(sys.modules, "__main__", program)
    flow = af.Flow("rows")
    flow.source([1]).map(lambda a, row=program.Row: row(a, 1)).sink(print)
    content = ship_job(graph_of(flow), TaskOptions())

    load_job(
        content
        # In a process that sends jobs to itself it is the class itself that gets its attributes
        # once more.
    )
    assert msgspec.convert({"a": "x", "n": 1}, program.Row) == program.Row("x", 1)
    with pytest.raises(msgspec.ValidationError, match="missing required field `n`"):
        msgspec.convert({"a": "x"}, program.Row)

    there = (
        "import gc, sys, msgspec\nfrom aioflow.cluster.shipping import load_job\njob = "
        "load_job(sys.stdin.buffer.read())\n"
    )
    there += (
        "[row] = [c for c in gc.get_objects() if isinstance(c, type) and str(c) == "
        "\"<class '__main__.Row'>\"]\n"
    )
    there += "print(row('x', 1).more)\nmsgspec.convert({'a': 'x'}, row)"
    done = subprocess.run(
        [sys.executable, "-c", there], input=content, capture_output=True, check=False
    )
    assert done.stdout.decode().strip() == "[]"
    assert "ValidationError: Object missing required field `n`" in done.stderr.decode()


def test_a_generic_namedtuple_of_the_program_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    """`NamedTuple` copies into the class a method of `Generic` that cannot be pickled; the class
    has it of `Generic` anyway.
    """
    program = ModuleType("__main__")
    lines = (
        "from typing import Generic, NamedTuple, TypeVar\nT = TypeVar('T')\nclass Row(NamedTuple, "
        "Generic[T]): n: T"
    )
    exec(
        f"{lines}\nclass Own(NamedTuple):\n    n: int\n    @classmethod\n    def "
        "__class_getitem__(cls, item): return item",
        vars(program),
    )
    monkeypatch.setitem(sys.modules, "__main__", program)
    flow = af.Flow("rows")
    flow.source([1]).map(lambda n, row=program.Row, own=program.Own: own(row(n).n)).sink(print)
    content = ship_job(graph_of(flow), TaskOptions())

    there = (
        "import gc, sys\nfrom aioflow.cluster.shipping import load_job\njob = "
        "load_job(sys.stdin.buffer.read())\n"
    )
    there += (
        "found = {c.__name__: c for c in gc.get_objects() if isinstance(c, type) and c.__module__ "
        "== '__main__'}\n"
    )
    there += "print(found['Row'](1), found['Row'][int].__origin__ is found['Row'], found['Own'][7])"
    done = subprocess.run(
        [sys.executable, "-c", there], input=content, capture_output=True, check=True
    )
    assert done.stdout.decode().strip() == "Row(n=1) True 7"


EVALUATED_LATE = pytest.mark.skipif(
    sys.version_info < (3, 14), reason="annotations are evaluated when a class is made"
)
"""For programs whose annotations name what is defined later, without quotes."""

ANNOTATED = """
from dataclasses import dataclass
from typing import NamedTuple, NewType
import msgspec

Cents = NewType("Cents", int)

@dataclass
class Inner:
    x: Cents

class Tuple(NamedTuple):
    inner: Inner

class Struct(msgspec.Struct):
    inner: Inner
    more: list[Struct]

@dataclass
class Row:
    inner: Inner
    tuple: Tuple
    struct: Struct
    before: Row | None = None

@dataclass
class Odd:
    inner: Inner
    other: Missing | None = None
"""


@pytest.mark.parametrize("as_text", [True, pytest.param(False, marks=EVALUATED_LATE)])
def test_annotations_of_the_programs_classes_are_known_on_arrival(
    monkeypatch: pytest.MonkeyPatch, as_text: bool
) -> None:
    """Typed JSON lines look there for what to make; as text it says names of a program that is
    not there.
    """
    program = ModuleType("__main__")
    text = f"from __future__ import annotations{ANNOTATED}" if as_text else ANNOTATED
    exec(compile(text, "<program>", "exec", dont_inherit=True), vars(program))
    monkeypatch.setitem(sys.modules, "__main__", program)
    flow = af.Flow("rows")
    flow.source([1]).map(
        lambda n, classes=(program.Row, program.Odd), cents=program.Cents: cents(n)
    ).sink(print)
    content = ship_job(graph_of(flow), TaskOptions())

    there = (
        "import gc, sys, msgspec\nfrom aioflow.cluster.shipping import load_job\njob = "
        "load_job(sys.stdin.buffer.read())\n"
    )
    there += (
        "globals().update({c.__name__: c for c in gc.get_objects() if isinstance(c, type) and "
        "c.__module__ == '__main__'})\n"
    )
    there += (
        "inner = {'x': 1}\nrow = {'inner': inner, 'tuple': [inner], 'struct': {'inner': inner, "
        "'more': []}}\n"
    )
    there += (
        "print(msgspec.convert({**row, 'before': row}, Row).before.struct, "
        "Odd.__annotations__['inner'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", there], input=content, capture_output=True, check=False
    )
    assert done.stdout.decode().strip() == "Struct(inner=Inner(x=1), more=[]) Inner", (
        done.stderr.decode()
    )


@EVALUATED_LATE
def test_annotations_that_no_program_can_evaluate_travel_as_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Names for type checkers alone, in functions and classes."""
    program = ModuleType("__main__")
    text = (
        "def double(n: Missing = 2, *, by: int = 2) -> Missing:\n    'Doubles.'\n    return n * by"
    )
    text += "\nclass Odd:\n    n: int\n    other: list[Missing]"
    exec(compile(text, "<program>", "exec", dont_inherit=True), vars(program))
    monkeypatch.setitem(sys.modules, "__main__", program)
    double, odd = pickle.loads(shipping._dumps((program.double, program.Odd), {}))
    assert (double(), double(3, by=3), double.__doc__) == (4, 9, "Doubles.")
    assert double.__annotations__ == {"n": "Missing", "by": "int", "return": "Missing"}
    assert odd.__annotations__ == {"n": "int", "other": "list[Missing]"}
    with pytest.raises(NameError):
        print(program.double.__annotations__)


CONSTRAINED = """
import threading
from dataclasses import dataclass
from typing import Annotated, NewType
import msgspec

Name = NewType("Name", str)
Positive = msgspec.Meta(gt=0, description="how many", extra={"unit": "pieces"})

class Handle:
    lock = threading.Lock()

class Counted(msgspec.Struct):
    n: Annotated[int, Positive]

@dataclass
class Named:
    name: Annotated[Name, msgspec.Meta(pattern="^a")]
    counted: Counted
"""

OF_THIS_PROCESS = """
@dataclass
class Holding:
    n: Annotated[int, Positive]
    first: Handle | None = None
    other: Annotated[int, threading.Lock()] = 0
    again: list[Around] = ()

@dataclass
class Around:
    handle: Handle
    holding: Holding
"""


@pytest.mark.parametrize("as_text", [False, True])
def test_constraints_of_fields_arrive_and_what_cannot_stays_as_it_was_written(
    monkeypatch: pytest.MonkeyPatch, as_text: bool
) -> None:
    program = ModuleType("__main__")
    text = (
        f"from __future__ import annotations{CONSTRAINED}{OF_THIS_PROCESS}"
        if as_text
        else CONSTRAINED
    )
    exec(compile(text, "<program>", "exec", dont_inherit=True), vars(program))
    monkeypatch.setitem(sys.modules, "__main__", program)
    flow = af.Flow("rows")
    classes = (program.Named, program.Holding, program.Around) if as_text else (program.Named,)
    flow.source([1]).map(lambda n, classes=classes: len(classes)).sink(print)
    content = ship_job(graph_of(flow), TaskOptions())

    there = (
        "import gc, sys, msgspec\nfrom aioflow.cluster.shipping import load_job\njob = "
        "load_job(sys.stdin.buffer.read())\n"
    )
    there += (
        "globals().update({c.__name__: c for c in gc.get_objects() if isinstance(c, type) and "
        "c.__module__ == '__main__'})\n"
    )
    there += (
        "print(msgspec.convert({'name': 'ab', 'counted': {'n': 1}}, Named))\nmeant = "
        "Counted.__annotations__['n']\n"
    )
    there += (
        "print(meant.__metadata__[0] == msgspec.Meta(gt=0, description='how many', extra={'unit': "
        "'pieces'}))\n"
    )
    there += "print(Named.__annotations__['name'].__origin__)\n"
    if as_text:
        there += (
            "kept = Holding.__annotations__\nprint(kept['n'] == meant, kept['first'], "
            "kept['other'], kept['again'])\n"
        )
        there += "print(Holding(1, other=2), Around.__annotations__)\n"
    there += "msgspec.convert({'name': 'b', 'counted': {'n': 1}}, Named)\n"
    done = subprocess.run(
        [sys.executable, "-c", there], input=content, capture_output=True, check=False
    )
    kept = [
        "True Handle | None Annotated[int, threading.Lock()] list[__main__.Around]",
        "Holding(n=1, first=None, other=2, again=()) {'handle': 'Handle', 'holding': <class "
        "'__main__.Holding'>}",
    ]
    lines = [
        "Named(name='ab', counted=Counted(n=1))",
        "True",
        "__main__.Name",
        *(kept if as_text else []),
    ]
    assert done.stdout.decode().splitlines() == lines, done.stderr.decode()
    assert "ValidationError: Expected `str` matching regex '^a'" in done.stderr.decode()


def test_further_names_of_an_enum_arrive_also_where_the_class_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A program whose JobManager runs in a thread of its own sends its jobs to itself."""
    program = ModuleType("__main__")
    exec(
        "from enum import Enum\nclass Colour(Enum):\n    RED = 1\n    CRIMSON = 1\n    def "
        "shade(self): return self.name",
        vars(program),
    )
    monkeypatch.setitem(sys.modules, "__main__", program)
    flow = af.Flow("colours")
    flow.source([1]).map(program.Colour).sink(print)
    content = ship_job(graph_of(flow), TaskOptions())

    load_job(content)
    assert program.Colour.CRIMSON is program.Colour.RED

    there = (
        "import sys\nfrom aioflow.cluster.shipping import load_job\njob = "
        "load_job(sys.stdin.buffer.read())\n"
    )
    there += (
        "import gc\n[colour] = [c for c in gc.get_objects() if isinstance(c, type) and c.__name__ "
        "== 'Colour']\n"
    )
    there += "print(list(colour.__members__), colour.CRIMSON is colour.RED, colour(1).shade())"
    done = subprocess.run(
        [sys.executable, "-c", there], input=content, capture_output=True, check=False
    )
    assert done.stdout.decode().strip() == "['RED', 'CRIMSON'] True RED", done.stderr


def test_a_module_that_is_missing_on_arrival_is_reported_and_the_job_loads(
    caplog: pytest.LogCaptureFixture,
) -> None:
    inner = ship_job(sample(), TaskOptions())
    modules, hidden, job = pickle.loads(inner)
    loaded = load_job(pickle.dumps((("not_there_at_all", *modules), hidden, job)))

    assert loaded.graph.name == "sample"
    assert "not_there_at_all" in caplog.text
