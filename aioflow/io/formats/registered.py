"""The wire format of schema registries: a zero byte and the id of a schema before each body.

`SchemaReaders` decodes bodies with the schemas of their ids. `SchemaHeads` returns the bytes to
write before each body. Both ask the registry only for an id or a subject that they do not know yet.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aioflow.core.errors import GraphError, did_you_mean
from aioflow.io.formats.format import Decoder, reason_of
from aioflow.io.formats.registry import ID_MAX, SchemaRegistry

if TYPE_CHECKING:
    from aioflow.core.host import Host
    from aioflow.io.formats.registry import Document, Schema

__all__ = ["HEAD_BYTES", "Registration", "SchemaHeads", "SchemaReaders", "checked_registration"]

HEAD = struct.Struct(">BI")
"""The zero byte and the id of the schema."""

HEAD_BYTES = HEAD.size

FORGET_S = 30.0
"""Time after which a schema that the registry lacked is requested again."""

MISSING_MAX = 10_000
"""Maximum number of missing schemas that are remembered."""

SUBJECTS = ("topic", "record", "topic-record")

Subject = str | Callable[[str, str], str]
"""One of `SUBJECTS`, or a function that returns the subject for a topic and the name of
a record.
"""


@dataclass(frozen=True)
class Registration:
    """A registry, and the arguments of a format that determine the subjects of its schemas."""

    registry: SchemaRegistry
    subject: Subject
    auto_register: bool

    def subject_of(self, topic: str, record: str | None, is_key: bool) -> str:
        """Returns the subject for the bodies of a topic; `record` is the full name of their
        schema.
        """
        if self.subject == "topic":
            return f"{topic}-{'key' if is_key else 'value'}"
        if record is None:
            raise GraphError(
                f"{self.registry!r}: subject is {self.subject!r}, which needs a schema with a "
                "name: give the format a type or a schema of a record"
            )
        if self.subject == "record":
            return record
        if self.subject == "topic-record":
            return f"{topic}-{record}"
        assert callable(self.subject)
        name = self.subject(topic, record)
        if not isinstance(name, str) or not name:
            raise GraphError(
                f"{self.registry!r}: subject= gave {name!r} for {topic!r} and {record!r}, "
                "expected the name of a subject"
            )
        return name


def checked_registration(
    registry: Any, subject: Any, auto_register: bool, place: str
) -> Registration | None:
    """Returns the arguments as a `Registration`, or None without a registry. Raises GraphError for
    an invalid argument.
    """
    if not callable(subject) and subject not in SUBJECTS:
        hint = did_you_mean(subject, SUBJECTS) if isinstance(subject, str) else ""
        raise GraphError(
            f"{place}: subject is {subject!r}, expected 'topic', 'record', 'topic-record' or a "
            f"function of a topic and the name of a record{hint}"
        )
    if registry is None:
        return None
    if not isinstance(registry, SchemaRegistry):
        shown = "a text" if isinstance(registry, str) else repr(registry)
        raise GraphError(f"{place}: registry is {shown}, expected af.io.SchemaRegistry(URL)")
    return Registration(registry, subject, auto_register)


class SchemaReaders:
    """Decodes bodies with the schemas of their ids.

    `reader_of(schema)` returns a function that decodes whole bodies of the schema. Errors of
    `reader_of` and of the returned function become a ValueError that names the schema and its
    subject.
    """

    def __init__(
        self,
        host: Host,
        registration: Registration,
        kind: str,
        reader_of: Callable[[Schema], Callable[[bytes], Any]],
    ) -> None:
        self._host = host
        self._registry = registration.registry
        self._kind = kind
        self._reader_of = reader_of
        self._readers: dict[bytes, Callable[[bytes], Any]] = {}
        self._missing: dict[bytes, float] = {}
        """Maps the head of a body whose schema the registry lacks to the time at which the schema
        is requested again.
        """

    def decoder(self) -> Decoder:
        return Decoder(self.decode, self.prepare)

    def decode(self, body: bytes) -> Any:
        read = self._readers.get(body[:HEAD_BYTES])
        if read is None:
            raise ValueError(self._refusal(body))
        return read(body)

    async def prepare(self, bodies: Iterable[bytes]) -> None:
        heads = {body[:HEAD_BYTES] for body in bodies} - self._readers.keys()
        if heads:
            await self._load(sorted(heads))

    async def _load(self, heads: list[bytes]) -> None:
        now = self._host.clock.monotonic()
        asked = {}
        for head in heads:
            if len(head) == HEAD_BYTES and self._missing.get(head, now) <= now:
                magic, id_ = HEAD.unpack(head)
                if magic == 0 and id_ <= ID_MAX:
                    asked[id_] = head
        if not asked:
            return
        found = await self._registry.client.schemas(list(asked), self._kind, self._host)
        if len(self._missing) + len(asked) > MISSING_MAX:
            self._missing.clear()
        again = self._host.clock.monotonic() + FORGET_S
        for id_, head in asked.items():
            if id_ in found:
                self._missing.pop(head, None)
                self._readers[head] = self._explaining(found[id_])
            else:
                self._missing[head] = again

    def _explaining(self, schema: Schema) -> Callable[[bytes], Any]:
        """Returns a function that decodes bodies of `schema`. The errors of this function name the
        schema.
        """
        try:
            read = self._reader_of(schema)
        except Exception as error:  # noqa: BLE001  # Libraries raise many errors for a bad schema.
            reason = f"{schema} cannot be read: {reason_of(error)}"

            def refuse(body: bytes) -> Any:
                raise ValueError(reason)

            return refuse

        def explaining(body: bytes) -> Any:
            try:
                return read(body)
            except Exception as error:  # Libraries raise many errors for bad bytes.
                raise ValueError(f"{schema}: {reason_of(error)}") from error

        return explaining

    def _refusal(self, body: bytes) -> str:
        if len(body) < HEAD_BYTES:
            return f"the body has {len(body)} bytes, expected a zero byte and the id of a schema"
        magic, id_ = HEAD.unpack(body[:HEAD_BYTES])
        if magic != 0:
            return (
                f"the body begins with the byte {magic}, expected 0, as in the wire format of a "
                "schema registry"
            )
        return f"schema {id_} is not in {self._registry!r}"


class SchemaHeads:
    """Returns the bytes that a sink writes before each body: the zero byte and the id of the
    schema.

    `document` is the schema of the sink, and `record` its full name. If `document` is None, the
    latest schema of the subject is used, and `learn` is called with this schema.
    """

    def __init__(
        self,
        host: Host,
        registration: Registration,
        kind: str,
        document: Document | None,
        record: str | None,
        *,
        learn: Callable[[Schema], None],
        is_key: bool,
    ) -> None:
        self._host = host
        self._registration = registration
        self._kind = kind
        self._document = document
        self._record = record
        self._learn = learn
        self._is_key = is_key

    async def head(self, destination: str) -> bytes:
        """Returns the head of the bodies at a destination. Raises GraphError if the registry
        refuses the schema.
        """
        given = self._registration
        subject = given.subject_of(destination, self._record, self._is_key)
        client = given.registry.client
        if self._document is None:
            schema = await client.latest(subject, self._kind, self._host)
            self._learn(schema)
            return HEAD.pack(0, schema.id)
        id_ = await client.identify(
            subject, self._document, self._host, register=given.auto_register
        )
        return HEAD.pack(0, id_)
