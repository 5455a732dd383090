"""Ships a job as bytes from the submitting process to the workers.

Functions and classes of importable modules are pickled by name. Lambdas, and functions and classes
of `__main__`, are pickled by value (cloudpickle). The graph is sent once. A task's descriptor
refers to vertices and partitionings by number, so that objects shared in the graph are shared in
the worker too. Only authenticated peers may use this module, because loading runs code. An object
that cannot be pickled fails the submission, and the error names its operator.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import io
import logging
import pickle
import sys
from collections.abc import Iterator, Sequence
from enum import Enum
from functools import partial
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, ForwardRef, Generic, NewType, get_type_hints

import cloudpickle
import msgspec

from aioflow.cluster.struct_classes import annotations_of, evaluated, with_fields
from aioflow.core.errors import GraphError
from aioflow.core.wire.kinds import kind_of
from aioflow.core.wire.types import DEFAULT_TYPES, Registration, TypeRegistry
from aioflow.graph.job_graph import JobGraph, JobVertex
from aioflow.graph.stream_graph import Partitioning, StreamNode
from aioflow.inspection.redaction import hidden_in, hide
from aioflow.operators.watermarks import WatermarkStrategy

if TYPE_CHECKING:
    from aioflow.graph.deployment import ExecutionAttemptId, TaskDeploymentDescriptor
    from aioflow.task.environment import TaskOptions

__all__ = ["JOB_BYTES_MAX", "ShippedJob", "load_job", "local_job", "ship_job"]

logger = logging.getLogger(__name__)

JOB_BYTES_MAX = 60 << 20
"""Maximum size of an encoded job. One call carries the job to a worker, and a call is limited to 64
MiB.
"""

REMEDY = (
    "what an operator holds must be picklable: take connections, locks and files in open() or "
    "through af.use(resource), "
    "and keep asyncio objects out of functions"
)


@dataclasses.dataclass(slots=True)
class ShippedJob:
    """The graph and options of a job in one process, and the types of its values."""

    graph: JobGraph
    options: TaskOptions
    types: TypeRegistry

    def ship_task(self, descriptor: TaskDeploymentDescriptor) -> bytes:
        """Encodes a descriptor for a process that has this job.

        Raises GraphError if a split of the task's source cannot be pickled.
        """
        target = io.BytesIO()
        try:
            _TaskPickler(self.graph, target).dump(descriptor)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise GraphError(
                f"task {descriptor.task_name} cannot travel to a worker ({reason}); splits are "
                "plain data"
            ) from error
        return target.getvalue()

    def ship_tasks(
        self, batch: Sequence[TaskDeploymentDescriptor]
    ) -> dict[ExecutionAttemptId, bytes | GraphError]:
        """Encodes each descriptor. The result for a descriptor that cannot be encoded is its
        error."""
        contents: dict[ExecutionAttemptId, bytes | GraphError] = {}
        for descriptor in batch:
            try:
                contents[descriptor.attempt] = self.ship_task(descriptor)
            except GraphError as error:
                contents[descriptor.attempt] = error
        return contents

    def load_task(self, content: bytes) -> TaskDeploymentDescriptor:
        """Decodes a descriptor, with the vertices and partitionings of this process's graph."""
        return _TaskUnpickler(self.graph, io.BytesIO(content)).load()  # type: ignore[no-any-return]


def ship_job(graph: JobGraph, options: TaskOptions) -> bytes:
    """Encodes a job.

    Raises GraphError, naming the operator, if an operator cannot be pickled or is too large.
    """
    graph = _without_what_stays(graph)
    modules: dict[str, None] = {}
    try:
        content = _dumps((graph, options, _own_types()), modules)
    except Exception as error:
        for what, name in _parts(graph):
            try:
                _dumps(what, {})
            except Exception as reason:
                raise GraphError(
                    f"{name} cannot travel to a worker ({type(reason).__name__}: {reason}): "
                    f"{REMEDY}"
                ) from reason
        raise GraphError(
            f"flow {graph.name!r} cannot travel to a worker ({type(error).__name__}: {error}): "
            f"{REMEDY}"
        ) from error
    if len(content) > JOB_BYTES_MAX:
        size, name = max((len(_dumps(what, {})), name) for what, name in _parts(graph))
        raise GraphError(
            f"flow {graph.name!r} takes {len(content)} bytes on its way to a worker, expected up "
            f"to {JOB_BYTES_MAX}; {name} alone takes "
            f"{size}: let a source function or a resource read its data there instead"
        )
    return pickle.dumps((tuple(modules), hidden_in(content), content))


def load_job(content: bytes) -> ShippedJob:
    """Decodes the output of `ship_job`. Runs code of the submitter."""
    modules, hidden, job = pickle.loads(content)
    for value in hidden:
        hide(value)
    for module in modules:
        # The module defines functions that were sent by value, and perhaps also the classes of
        # their results.
        try:
            importlib.import_module(module)
        # Without the module only the classes that it defines are missing, if any.
        except Exception as error:  # noqa: BLE001
            logger.warning(
                "module %s of the program cannot be imported in a worker: %r", module, error
            )
    graph, options, own_types = pickle.loads(job)
    for one in own_types:
        if one.cls.__qualname__ != one.qualname:
            # A class sent by value has lost its nesting. Its qualified name is part of keys and of
            # encoded values.
            one.cls.__qualname__ = one.qualname
    return ShippedJob(graph, options, _registry_with(own_types))


def local_job(graph: JobGraph, options: TaskOptions) -> ShippedJob:
    """Returns the job in the process that submits it."""
    return ShippedJob(graph, options, _registry_with(_own_types()))


def _parts(graph: JobGraph) -> Iterator[tuple[Any, str]]:
    """Yields each object of a graph that holds user code, with a name of the object for error
    messages."""
    for vertex in graph.vertices:
        for node in vertex.nodes:
            yield node, f"operator {node.name!r}"
    for edge in graph.edges:
        yield (
            edge.partitioning,
            f"the partitioning between {graph.vertex(edge.source).name!r} and "
            f"{graph.vertex(edge.target).name!r}",
        )


def _without_what_stays(graph: JobGraph) -> JobGraph:
    """Returns the graph without the user code of vertices that run in the submitting process.

    Only the names of these operators are sent, and the alignment of their sources.
    """
    vertices = [
        vertex
        if not vertex.stays_here
        else dataclasses.replace(
            vertex,
            nodes=tuple(
                dataclasses.replace(n, factory=None, source=None, watermarks=_alignment_of(n))
                for n in vertex.nodes
            ),
        )
        for vertex in graph.vertices
    ]
    return dataclasses.replace(graph, vertices=tuple(vertices))


def _alignment_of(node: StreamNode) -> WatermarkStrategy[Any] | None:
    """Returns a watermark strategy with only the alignment of the strategy of `node`; None if that
    has no alignment."""
    alignment = None if node.watermarks is None else node.watermarks.alignment
    if alignment is None:
        return None
    return dataclasses.replace(WatermarkStrategy[Any].ingestion_time(), alignment=alignment)


# The types of values.


@dataclasses.dataclass(frozen=True, slots=True)
class _OwnType:
    cls: type
    qualname: str
    registration: Registration


def _own_types() -> list[_OwnType]:
    """Returns the types registered here, and record classes that are sent by value.

    A worker cannot import these record classes, above all those of `__main__`.
    """
    known = DEFAULT_TYPES.registrations()
    registered = {registration.cls for registration in known}
    known += [
        Registration(cls, f"{cls.__module__}:{cls.__qualname__}")
        for cls in _classes_by_value()
        if cls not in registered
    ]
    return [_OwnType(one.cls, one.cls.__qualname__, one) for one in known if _can_travel(one)]


def _can_travel(registration: Registration) -> bool:
    """Whether this type can be sent to a worker.

    A type that cannot be pickled is not an error here: an error is raised only when a value of the
    type is sent.
    """
    try:
        _dumps(registration, {})
    # An error of any kind: class attributes may be anything.
    except Exception as error:  # noqa: BLE001
        logger.info("type %s is not known to the workers: %r", registration.name, error)
        return False
    return True


def _registry_with(own_types: list[_OwnType]) -> TypeRegistry:
    registry = TypeRegistry(DEFAULT_TYPES)
    for own in own_types:
        one = own.registration
        registry.register(
            one.cls, one.name, encode=one.encode, decode=one.decode, aliases=one.aliases
        )
    return registry


def _classes_by_value() -> Iterator[type]:
    own = {"__main__", *cloudpickle.list_registry_pickle_by_value()}
    waiting = [
        value
        for name in sorted(own & sys.modules.keys())
        for value in vars(sys.modules[name]).values()
    ]
    seen = set()
    while waiting:
        value = waiting.pop(0)
        if isinstance(value, type) and value.__module__ in own and value not in seen:
            seen.add(value)
            waiting += vars(value).values()  # Classes may be nested.
            if kind_of(value) is not None:
                yield value


# Pickling.


def _dumps(what: Any, modules: dict[str, None]) -> bytes:
    target = io.BytesIO()
    _JobPickler(target, modules).dump(what)
    return target.getvalue()


MSGSPEC_CACHE = "__msgspec_cache__"
"""The attribute that msgspec adds to a class when its first value is made.

The attribute cannot be pickled. msgspec makes it again if it is missing.
"""

LEFT_OUT = frozenset((MSGSPEC_CACHE, "__annotations_cache__", "__classdictcell__"))
"""Attributes of a class that are not sent.

From Python 3.14 on, the second attribute holds annotations, which are sent separately, and the
third holds the names of a class body.
"""

UNNAMED_FILE = "<dynamic-code>"
"""Placeholder that cloudpickle 3.1.3 writes for the file name of a code object."""


class _JobPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types.
    """A pickler that also records the modules that define the functions which it writes."""

    def __init__(
        self,
        target: io.BytesIO,
        modules: dict[str, None],
        annotations: dict[type, dict[str, Any]] | None = None,
    ) -> None:
        super().__init__(target)
        self._modules = modules
        self._annotations = {} if annotations is None else annotations
        """The annotations to write, by class, for classes that are sent by value.

        The annotations of a class are computed once, even if classes refer to each other.
        """

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, FunctionType):
            module = value.__module__
            if (
                isinstance(module, str)
                and not _is_by_value(module)
                and module in sys.modules
                and not module.startswith("aioflow.")
            ):
                self._modules[module] = None
        elif isinstance(value, CodeType):
            return self._with_filename(value)
        elif isinstance(value, type):
            reduced = self._on_its_own(value, super().reducer_override(value))
            if issubclass(value, msgspec.Struct):
                return with_fields(value, reduced)
            return _with_aliases(value, reduced) if issubclass(value, Enum) else reduced
        elif isinstance(value, NewType) and _is_by_value(value.__module__):
            # By name, the worker would look for it in its own program.
            return NewType, (value.__name__, value.__supertype__), {"__module__": value.__module__}
        elif type(value) is msgspec.Meta:
            return partial(
                msgspec.Meta, **dict(value.__rich_repr__())
            ), ()  # It cannot be pickled; `__rich_repr__` lists all its arguments.
        elif type(value) is ForwardRef:
            # From Python 3.14 on a ForwardRef holds all global names of its program.
            return ForwardRef, (value.__forward_arg__,)
        elif type(value) is functools.cached_property:
            # Until Python 3.11 a cached_property has a lock.
            return functools.cached_property, (value.func,), {"attrname": value.attrname}
        elif value is dataclasses.MISSING:
            # By name: fields without a default would take a copy for their default.
            return "MISSING"
        elif (reduced := self._reduce_plainly(value)) is not None:
            return reduced
        return super().reducer_override(value)

    def _dynamic_function_reduce(self, function: FunctionType) -> Any:
        """Reduces a function by value. Annotations that cannot be evaluated are sent as text."""
        return super()._dynamic_function_reduce(evaluated(function))

    def _with_filename(self, code: CodeType) -> tuple[Any, ...]:
        """Reduces the code of a function that is sent by value, with the name of its file.

        cloudpickle 3.1.3 leaves the name out. A traceback then shows no line of user code.
        """
        make, args = self.dispatch_table[CodeType](code)
        named = (code.co_filename if arg == UNNAMED_FILE else arg for arg in args)
        return make, tuple(named)

    def _on_its_own(self, cls: type, reduced: Any) -> Any:
        """Reduces a class that is sent by value, so that it needs nothing of its program.

        The msgspec cache is left out. The class itself keeps the cache, since another thread may be
        using it. Annotations in text form are resolved if they can be, and if the result can be
        pickled. Otherwise readers of the annotations, such as typed JSON lines, would look up the
        names in the program of the worker.
        """
        if type(reduced) is not tuple or len(reduced) != 6:
            return reduced  # By reference.
        make, args, (attributes, slots), *rest = reduced
        kept = {name: value for name, value in attributes.items() if name not in LEFT_OUT}
        subscript = kept.get("__class_getitem__")
        of_generic = getattr(Generic.__class_getitem__, "__func__", None)  # None from 3.12 on.
        if isinstance(subscript, classmethod) and subscript.__func__ is of_generic:
            # A generic NamedTuple has a copy of Generic's method, which cannot be pickled.
            del kept["__class_getitem__"]
        if own := annotations_of(cls):
            kept["__annotations__"] = self._meant(cls, own)
        return make, args, (kept, slots), *rest

    def _meant(self, cls: type, own: dict[str, Any]) -> dict[str, Any]:
        if (known := self._annotations.get(cls)) is not None:
            return known
        self._annotations[cls] = (
            # For the calls below: annotations may refer to the class itself.
            own
        )
        try:
            meant = get_type_hints(cls, include_extras=True)
        except Exception as error:  # noqa: BLE001  # An error of any kind: they are expressions.
            logger.debug(
                "annotations of %s travel as they were written: %r", cls.__qualname__, error
            )
            return own
        found = {
            name: meant[name] if name in meant and self._travels(meant[name]) else written
            for name, written in own.items()
        }
        self._annotations[cls] = found
        return found

    def _travels(self, annotation: Any) -> bool:
        try:
            _JobPickler(io.BytesIO(), {}, self._annotations).dump(annotation)
        except Exception as error:  # noqa: BLE001  # Of any kind: an annotation may be anything.
            logger.debug("annotation %r travels as it was written: %r", annotation, error)
            return False
        return True

    def _reduce_plainly(self, value: Any) -> tuple[Any, ...] | None:
        """Reduces an object that pickle restores from its attributes alone. Returns None for any
        other object."""
        cls = type(value)
        usual = all(
            getattr(cls, name) is getattr(object, name) for name in ("__reduce_ex__", "__reduce__")
        )
        if not usual or hasattr(cls, "__setstate__") or cls in self.dispatch_table:
            return None
        reduced: tuple[Any, ...] = value.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        return (*reduced, _set_attributes) if type(reduced[2]) is dict else None


def _is_by_value(module: str | None) -> bool:
    """Whether no worker can import the definitions of this module."""
    return module == "__main__" or module in cloudpickle.list_registry_pickle_by_value()


def _with_aliases(cls: type[Enum], reduced: Any) -> Any:
    """Reduces an Enum that is sent by value, with its aliases among the members.

    cloudpickle keeps aliases among the attributes of the class, and sets them again if the class
    exists already. Setting them fails in a process that sends jobs to itself.
    """
    if type(reduced) is not tuple or len(reduced) != 6:
        return reduced  # By reference.
    make, (bases, name, qualname, members, *place), (attributes, slots), *rest = reduced
    every = {member: found.value for member, found in cls.__members__.items()}
    kept = {attribute: value for attribute, value in attributes.items() if attribute not in every}
    return make, (bases, name, qualname, members | every, *place), (kept, slots), *rest


def _set_attributes(instance: object, state: dict[str, Any]) -> None:
    """Sets attributes one by one, as `__init__` did.

    CPython keeps attributes that are set one by one in the object itself. If pickle writes
    attributes into `__dict__`, they are looked up there from then on. A call of a function object
    then takes half as long again.
    """
    cls = type(instance)
    if any(hasattr(type(inspect.getattr_static(cls, name, None)), "__set__") for name in state):
        instance.__dict__.update(state)  # A property hides an attribute of the same name.
        return
    for name, value in state.items():
        object.__setattr__(instance, name, value)


class _TaskPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types.
    def __init__(self, graph: JobGraph, target: io.BytesIO) -> None:
        super().__init__(target)
        self._graph = graph

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, JobVertex):
            return "vertex", (value.id, value.parallelism)
        if isinstance(value, Partitioning):
            for edge in self._graph.edges:
                if edge.partitioning is value:
                    return "edge", edge.id
        return None


class _TaskUnpickler(pickle.Unpickler):
    def __init__(self, graph: JobGraph, source: io.BytesIO) -> None:
        super().__init__(source)
        self._graph = graph

    def persistent_load(self, reference: Any) -> Any:
        kind, which = reference
        if kind == "edge":
            return self._graph.edges[which].partitioning
        number, parallelism = which
        vertex = self._graph.vertex(number)
        # A job may have been rescaled since the graph was sent.
        same = vertex.parallelism == parallelism
        return vertex if same else dataclasses.replace(vertex, parallelism=parallelism)
