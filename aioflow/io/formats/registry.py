"""A client of schema registries: `SchemaRegistry(url)`, for the REST interface of Confluent's
registry, which Karapace and Apicurio offer too.

Schemas never change, so each is requested once and cached by its id. If a registry cannot be
reached, or answers 429 or 5xx, the client logs this and retries at growing intervals until the
registry answers. A registry that has never answered is retried only for `START_PATIENCE_S`. Other
refusals are errors that name the registry and the subject, but no credentials.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

import msgspec

from aioflow.advice.hints import explained_methods
from aioflow.core.errors import Broken, GraphError
from aioflow.inspection.redaction import redacted
from aioflow.io import backoff as start
from aioflow.io.arguments import checked_headers, checked_seconds, one_or_more
from aioflow.io.backoff import Backoff
from aioflow.io.web.http_client import checked_url, client_session, http_error

if TYPE_CHECKING:
    from aioflow.core.host import Host
    from aioflow.core.timeunits import Duration

__all__ = [
    "AVRO",
    "JSON",
    "PROTOBUF",
    "Document",
    "RegistryClient",
    "Schema",
    "SchemaRegistry",
    "is_proto_file",
]

AVRO, JSON, PROTOBUF = "AVRO", "JSON", "PROTOBUF"
"""The types of schemas, as registries name them."""

MAX_BACKOFF_S = 5.0

LATE_S = 3.0
"""Time in seconds for which a missing schema is requested again, because a replica of the registry
may get a new schema late.
"""

LATE_IDS = 8
"""Maximum number of missing schemas that are requested again. If more are missing at once, lateness
is not the cause.
"""

ID_MAX = 2**31 - 1

ANSWER_BYTES_MAX = 16 * 1024 * 1024

SHOWN_CHARACTERS = 600
"""Maximum number of characters of an answer that an error shows."""

MEDIA_TYPE = "application/vnd.schemaregistry.v1+json"


@dataclass(frozen=True)
class Schema:
    """A schema of a registry. Its str names it in log and error messages."""

    id: int
    text: str
    references: tuple[tuple[str, str], ...] = ()
    """The name and the text of each schema that this schema refers to, directly or indirectly. A
    schema comes after the schemas that it needs.
    """
    where: str = ""
    """The subject and version of the schema, for messages. Empty if the registry does not report
    them.
    """

    def __str__(self) -> str:
        return f"schema {self.id}" + (f" ({self.where})" if self.where else "")


@dataclass(frozen=True)
class Document:
    """A schema to register."""

    kind: str
    text: str
    references: Mapping[str, Document] = field(default_factory=dict)
    """Maps the name of each import in this schema to the imported schema. The name is also the
    subject of that schema.
    """


@explained_methods
class SchemaRegistry:
    """A schema registry with the REST interface of Confluent's, such as Karapace and Apicurio.

    `url` is the address of the interface, or a list of addresses, which are tried in turn. `auth`
    is a user and a password, or a token (`Authorization: Bearer`). `headers` go with each request.
    `timeout` limits the time of a request. `backoff` is the first pause before a failed request is
    repeated; later pauses are longer. Formats that share a `SchemaRegistry` share its cached
    schemas.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        auth: tuple[str, str] | str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: Duration = "10s",
        backoff: Duration = "200ms",
    ) -> None:
        given = [str(one) for one in one_or_more(url)]
        for one in given:
            checked_url(one, "SchemaRegistry", ("http", "https"))
        if not given:
            raise GraphError("SchemaRegistry: expected the URL of a registry, http://HOST:PORT")
        urls = [_without_user(one) for one in given]
        place = f"SchemaRegistry({', '.join(urls)!r})"
        users = {_user_of(one) for one in given} - {None}
        if auth is None and users:
            if len(users) > 1:
                raise GraphError(f"{place}: the URLs name different users: give auth=")
            auth = users.pop()
        sent = {"Accept": f"{MEDIA_TYPE}, application/json", **checked_headers(headers, place)}
        if auth is not None:
            sent["Authorization"] = _authorization(auth, place)
        checked_seconds(backoff, "backoff", place, may_be_zero=True)
        timeout_s = checked_seconds(timeout, "timeout", place)
        self.client = RegistryClient(urls, sent, timeout_s, backoff)

    def __repr__(self) -> str:
        return repr(self.client)


class RegistryClient:
    """Sends requests to a registry, and caches the schemas that it returned."""

    def __init__(
        self, urls: list[str], headers: dict[str, str], timeout_s: float, backoff: Duration
    ) -> None:
        self._urls = urls
        self._headers = headers
        self._timeout_s = timeout_s
        self._backoff = backoff
        self._first = 0
        """Index of the URL that answered last. Requests try it first."""
        self._has_answered = False
        self._schemas: dict[tuple[int, str], Schema] = {}
        self._asking: dict[Any, asyncio.Future[None]] = {}
        """Maps (event loop, schema id, schema type) to a future that completes with the running
        request.
        """

    def __repr__(self) -> str:
        return f"SchemaRegistry({', '.join(self._urls)!r})"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_schemas": {}, "_asking": {}, "_has_answered": False}

    async def schemas(self, ids: Sequence[int], kind: str, host: Host) -> dict[int, Schema]:
        """Returns the schemas with the given ids, by id, without those that the registry lacks.
        `kind` is the type of the schemas, such as "AVRO".

        Requests missing schemas again for `LATE_S`, unless there are more than `LATE_IDS`.
        """
        found: dict[int, Schema] = {}
        left = list(ids)
        backoff = Backoff(host.rng, self._backoff)
        until = host.clock.monotonic() + LATE_S
        while True:
            for id_ in left:
                schema = await self._schema(id_, kind, host)
                if schema is not None:
                    found[id_] = schema
            left = [id_ for id_ in left if id_ not in found]
            if not left or len(left) > LATE_IDS or host.clock.monotonic() >= until:
                return found
            await backoff.sleep()

    async def _schema(self, id_: int, kind: str, host: Host) -> Schema | None:
        """Returns the schema with this id, or None if the registry lacks it. Concurrent calls in
        one event loop share a request.
        """
        loop = asyncio.get_running_loop()
        asked = (loop, id_, kind)
        while (known := self._schemas.get((id_, kind))) is None and asked in self._asking:
            await asyncio.shield(self._asking[asked])
        if known is not None:
            return known
        done = self._asking[asked] = loop.create_future()
        try:
            schema = await self._request_schema(id_, kind, host)
            if schema is not None:
                self._schemas[id_, kind] = schema
            return schema
        finally:
            del self._asking[asked]
            done.set_result(None)

    async def _request_schema(self, id_: int, kind: str, host: Host) -> Schema | None:
        status, answer = await self._described(f"/schemas/ids/{id_}", kind, host)
        if status == 404:
            return None
        self._refuse(status, answer, f"schema {id_}")
        references = await self._references(answer, kind, host)
        return Schema(id_, self._text_of(answer), references, await self._place_of(id_))

    async def _place_of(self, id_: int) -> str:
        """Returns the subject and version of a schema, for log and error messages, or "" if the
        registry does not report them.
        """
        import aiohttp

        url = f"{self._urls[self._first]}/schemas/ids/{id_}/versions"
        try:
            status, content = await self._answer("GET", url, None)
            answer = self._decoded(status, url, content)
        except (aiohttp.ClientError, OSError, TimeoutError, GraphError):
            return ""
        if status != 200 or not isinstance(answer, list):
            return ""
        places = [
            f"subject {one['subject']!r}, version {one['version']}"
            for one in answer
            if isinstance(one, dict) and {"subject", "version"} <= one.keys()
        ]
        return "; ".join(places[:3])

    async def _references(self, answer: Any, kind: str, host: Host) -> tuple[tuple[str, str], ...]:
        """Returns the name and the text of each schema that an answer refers to, directly or
        indirectly. A schema comes after the schemas that it needs.
        """
        found: dict[str, str] = {}
        under_way: set[tuple[str, int]] = set()

        async def collect(answer: Any) -> None:
            for name, subject, version in self._references_of(answer):
                if (subject, version) in under_way:
                    continue
                under_way.add((subject, version))
                path = f"/subjects/{_quoted(subject)}/versions/{version}"
                status, referred = await self._described(path, kind, host)
                self._refuse(status, referred, f"version {version} of subject {subject!r}")
                await collect(referred)
                found[name] = self._text_of(referred)

        await collect(answer)
        return tuple(found.items())

    async def latest(self, subject: str, kind: str, host: Host) -> Schema:
        """Returns the latest schema of a subject."""
        path = f"/subjects/{_quoted(subject)}/versions/latest"
        status, answer = await self._described(path, kind, host)
        if status == 404:
            raise GraphError(
                f"{self!r}: there is no subject {subject!r}: register its schema, or give the "
                "format a type or a schema"
            )
        self._refuse(status, answer, f"subject {subject!r}")
        found = answer.get("schemaType") or AVRO
        if found != kind:
            raise GraphError(
                f"{self!r}: subject {subject!r} has a schema of type {found}, expected {kind}"
            )
        where = f"subject {subject!r}, version {answer.get('version')}"
        references = await self._references(answer, kind, host)
        return Schema(self._id_of(answer), self._text_of(answer), references, where)

    async def identify(
        self, subject: str, document: Document, host: Host, *, register: bool
    ) -> int:
        """Returns the id of a schema under a subject. With `register`, registers the schema if it
        is new.
        """
        references = []
        for name, other in document.references.items():
            await self.identify(name, other, host, register=register)
            # Only the answer to a look-up has the version.
            answer = await self._posted(f"/subjects/{_quoted(name)}", name, other, [], host)
            references.append({"name": name, "subject": name, "version": answer.get("version")})
        path = f"/subjects/{_quoted(subject)}" + ("/versions" if register else "")
        answer = await self._posted(path, subject, document, references, host)
        return self._id_of(answer)

    async def _posted(
        self,
        path: str,
        subject: str,
        document: Document,
        references: list[dict[str, Any]],
        host: Host,
    ) -> Any:
        body: dict[str, Any] = {"schema": document.text}
        if document.kind != AVRO:
            body["schemaType"] = document.kind
        if references:
            body["references"] = references
        status, answer = await self._ask(host, "POST", path, body)
        if status == 404 and path.endswith("/versions"):
            raise GraphError(
                f"{self!r}: {path} is not there, {_message(answer)}: give the URL of the REST "
                "interface of Confluent's registry, which for Apicurio's is "
                "http://HOST:PORT/apis/ccompat/v7"
            )
        if status == 404:
            raise GraphError(
                f"{self!r}: subject {subject!r} does not have the schema of this sink: register "
                "it, or give auto_register=True"
            )
        if status == 409:
            raise GraphError(
                f"{self!r}: the schema of this sink is not compatible with subject {subject!r}: "
                f"{_message(answer)}"
            )
        self._refuse(status, answer, f"subject {subject!r}")
        return answer

    async def _described(self, path: str, kind: str, host: Host) -> tuple[int, Any]:
        """Requests a schema. Returns the HTTP status and the answer. A Protobuf schema is in the
        form of a serialized descriptor if possible.

        Some registries store descriptors as they were sent, and fail when asked to serialize them.
        Others return the text of a .proto file unless asked for a descriptor.
        """
        status, answer = await self._ask(host, "GET", path)
        text = answer.get("schema") if kind == PROTOBUF and isinstance(answer, dict) else None
        if isinstance(text, str) and is_proto_file(text):
            asked = await self._ask(host, "GET", f"{path}?format=serialized", may_fail=True)
            return asked if asked[0] == 200 else (status, answer)
        return status, answer

    async def _ask(
        self, host: Host, method: str, path: str, body: Any = None, *, may_fail: bool = False
    ) -> tuple[int, Any]:
        """Sends a request. Returns the HTTP status and the decoded answer. Retries while the
        registry cannot be reached.

        With `may_fail`, the status 500 is an answer instead of a reason to retry. Raises Broken if
        the registry has never answered, and does not answer within `START_PATIENCE_S`.
        """
        import aiohttp

        backoff = Backoff(host.rng, self._backoff, MAX_BACKOFF_S)
        first = self._first
        until = host.clock.monotonic() + start.START_PATIENCE_S
        while True:
            place = (first + backoff.tries) % len(self._urls)
            url = self._urls[place] + path
            try:
                status, content = await self._answer(method, url, body)
                if status == 429 or (status >= 500 and not (may_fail and status == 500)):
                    raise http_error(status, url, content)
                self._first, self._has_answered = place, True
                return status, self._decoded(status, url, content)
            except (aiohttp.ClientError, OSError, TimeoutError, Broken) as error:
                backoff.failed(self, error, f"repeating {method} {path}")
                asked_all = backoff.tries + 1 >= len(self._urls)
                if asked_all and not self._has_answered and host.clock.monotonic() >= until:
                    raise Broken(
                        f"{self!r} has not answered within {start.START_PATIENCE_S:g} s of the "
                        f"start: {redacted(str(error))}: check the URL, and that the registry runs"
                    ) from error
            await backoff.sleep()

    async def _answer(self, method: str, url: str, body: Any) -> tuple[int, bytes]:
        sent = None if body is None else msgspec.json.encode(body)
        headers = self._headers if sent is None else {**self._headers, "Content-Type": MEDIA_TYPE}
        async with client_session(headers, self._timeout_s) as session:
            async with session.request(method, url, data=sent) as response:
                if response.method != method:
                    raise GraphError(
                        f"{self!r}: {url} redirects a {method} to {redacted(str(response.url))}, "
                        "which loses its content: give the URL of the registry itself"
                    )
                content = bytearray()
                async for piece in response.content.iter_chunked(65_536):
                    content += piece
                    if len(content) > ANSWER_BYTES_MAX:
                        raise GraphError(
                            f"{self!r}: the answer has more than {ANSWER_BYTES_MAX} bytes"
                        )
                return response.status, bytes(content)

    def _decoded(self, status: int, url: str, content: bytes) -> Any:
        """Decodes the content of an answer. Returns None for a refusal that is not JSON.

        Raises GraphError if the server is no schema registry: the 404 answers of registries are
        JSON with an error code.
        """
        try:
            answer = msgspec.json.decode(content)
            if status != 404 or (isinstance(answer, dict) and "error_code" in answer):
                return answer
            raise msgspec.DecodeError
        except (msgspec.DecodeError, UnicodeDecodeError):
            if not 200 <= status < 300 and status != 404:
                return None
            shown = redacted(content[:80].decode(errors="replace"))
            raise GraphError(
                f"{self!r}: the server at {url} is not a schema registry, check the URL: {shown!r}"
            ) from None

    def _refuse(self, status: int, answer: Any, what: str) -> None:
        """Raises GraphError unless the HTTP `status` and the `answer` mean success. `what`
        describes the request.
        """
        if status in (401, 403):
            raise GraphError(
                f"{self!r}: the registry refuses {what} ({status}): {_message(answer)}; give "
                "auth=(USER, PASSWORD), or a token, of a user that may use it"
            )
        if not 200 <= status < 300:
            raise GraphError(f"{self!r}: {what} was refused ({status}): {_message(answer)}")
        if not isinstance(answer, dict):
            raise GraphError(
                f"{self!r}: the answer to {what} is not a JSON object, so the server is not a "
                "schema registry: check the URL"
            )

    def _text_of(self, answer: Any) -> str:
        if not isinstance(text := answer.get("schema"), str):
            raise GraphError(
                f"{self!r}: an answer has no schema, so the server is not a schema registry: "
                "check the URL"
            )
        return text

    def _id_of(self, answer: Any) -> int:
        id_ = answer.get("id")
        if not isinstance(id_, int) or not 0 <= id_ <= ID_MAX:
            raise GraphError(
                f"{self!r}: an answer has the id {id_!r}, expected a number of 31 bits, so the "
                "server is not a schema registry: check the URL"
            )
        return id_

    def _references_of(self, answer: Any) -> list[tuple[str, str, Any]]:
        """Returns name, subject and version of each schema that the schema in `answer`
        refers to.
        """
        given = answer.get("references") or []
        try:
            return [(one["name"], one["subject"], one["version"]) for one in given]
        except (TypeError, KeyError):
            raise GraphError(
                f"{self!r}: an answer has the references {str(given)[:80]}, expected name, "
                "subject and version of each, so the server is not a schema registry: check the URL"
            ) from None


def is_proto_file(schema: str) -> bool:
    """Returns whether `schema` is the text of a .proto file, which only protoc can read.

    A serialized descriptor is base64, which contains neither `;` nor `{`.
    """
    return ";" in schema or "{" in schema


def _quoted(subject: str) -> str:
    return quote(subject, safe="")


def _message(answer: Any) -> str:
    """Returns the registry's error message from `answer`, the answer to a refused request."""
    said = answer.get("message") if isinstance(answer, dict) else None
    text = redacted(str(said or "it does not say why"))
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def _user_of(url: str) -> tuple[str, str] | None:
    parts = urlsplit(url)
    if parts.username is None:
        return None
    return unquote(parts.username), unquote(parts.password or "")


def _without_user(url: str) -> str:
    parts = urlsplit(url)
    place = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, place, parts.path.rstrip("/"), "", ""))


def _authorization(auth: Any, place: str) -> str:
    """Returns the Authorization header for `auth`. Errors do not show the header."""
    if isinstance(auth, str) and auth and auth.isprintable():
        return f"Bearer {auth}"
    if isinstance(auth, tuple) and len(auth) == 2 and all(isinstance(one, str) for one in auth):
        return "Basic " + base64.b64encode(":".join(auth).encode()).decode()
    raise GraphError(f"{place}: expected auth=(USER, PASSWORD) or a token")
