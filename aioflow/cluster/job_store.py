"""The durable state of a Dispatcher: the running jobs, and the ids that ended for good.

    jobs/<job id>/<fencing token>    one job as the leader with that token knows it; the largest
                                     token counts
    ended/<job id>.<fencing token>   how it ended; such an id is never run again

A file appears whole or not at all: it is written under another name, fsynced and renamed, and its
directory is fsynced. Each leader writes only files with its own token. So a late write of an older
leader can neither replace nor hide a write of a newer one. `recover` writes each running job again
under the new token. From then on older files of this job have no effect, neither stored jobs nor
recorded ends. If a valid entry cannot be read, recovery stops: a job is never lost silently.

A job ends in two steps: `end` records the id as ended, `forget` removes the stored job. After a
crash between the two, `recover` reports the job as ended, so that its clean-up is done again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgpack

from aioflow.cluster.execution_graph import JobStatus
from aioflow.core.errors import RestoreError, StaleLeader

if TYPE_CHECKING:
    from aioflow.cluster.leadership import Leadership
    from aioflow.core.host import Host

__all__ = ["EndedJob", "JobStore", "PersistedJob", "Recovered"]

MAGIC = b"AIOFJOB1"
DIGEST_BYTES = 16
JOB_ID = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistedJob:
    """A submitted job and its status.

    `graph` is the encoded job, which is not decoded here. `config` holds the submitter's settings
    as plain data.
    """

    job_id: str
    name: str
    graph: bytes
    # Any: plain msgpack data that the submitter set.
    config: Mapping[str, Any] = field(default_factory=dict)
    status: JobStatus = JobStatus.CREATED
    submitted_ms: int = 0
    """Time of the submission in wall-clock ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedJob:
    """How a job ended for good.

    `error` is the text of the error that failed the job, with its notes; empty if there was none.
    """

    job_id: str
    name: str
    status: JobStatus
    submitted_ms: int
    ended_ms: int
    error: str = ""
    savepoint: str = ""
    """URL of the savepoint with which the job was stopped; empty if there is none."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """The stored jobs that a new leader finds. Each list is in the order of the job ids."""

    jobs: list[PersistedJob]
    """Jobs to run again."""
    to_clean_up: list[EndedJob]
    """Ended jobs whose clean-up may be incomplete: clean up again, then call `forget`."""
    ended: list[EndedJob]
    """All jobs that ended for good, including those to clean up."""


class JobStore:
    """The store of one leader.

    Methods that write raise StaleLeader if the leader no longer leads, even if the write succeeded.
    The caller must not acknowledge the job in that case.
    """

    def __init__(self, host: Host, path: str, leadership: Leadership) -> None:
        self._host = host
        self._path = path
        self._leadership = leadership

    async def recover(self) -> Recovered:
        """Reads all entries, and writes each running job again under the token of this leader. Call
        this method once, before all others.

        Raises RestoreError, naming the file, if a valid entry cannot be read.
        """
        fs = self._host.fs
        await fs.mkdirs(f"{self._path}/jobs")
        await fs.mkdirs(f"{self._path}/ended")
        await fs.fsync_dir(self._path)
        jobs: list[PersistedJob] = []
        to_clean_up: list[EndedJob] = []
        ended = await self._ended_tokens()
        for job_id in await fs.list(f"{self._path}/jobs"):
            tokens = await self._tokens(job_id)
            ended_by = ended.get(job_id, 0)
            if ended_by and (not tokens or ended_by >= tokens[-1]):
                to_clean_up.append(await self._read_ended(job_id, ended_by))
                continue
            # An older leader wrote this end after a newer one had taken the job over.
            ended.pop(job_id, None)
            if not tokens:
                # Its submission was never acknowledged.
                await self._remove(job_id)
                continue
            jobs.append(await self._take_over(job_id, tokens[-1]))
        return Recovered(
            jobs,
            to_clean_up,
            [await self._read_ended(job_id, token) for job_id, token in ended.items()],
        )

    async def put(self, job: PersistedJob) -> None:
        """Stores a job, or its new status, durably, and removes older versions."""
        if not JOB_ID.match(job.job_id):
            raise ValueError(
                f"job id {job.job_id!r} cannot be stored: expected 1 to 64 of the characters A-Z "
                "a-z 0-9 _ -"
            )
        fs, directory = self._host.fs, f"{self._path}/jobs/{job.job_id}"
        self._leadership.check()
        await fs.mkdirs(directory)
        await fs.fsync_dir(f"{self._path}/jobs")
        await self._write(directory, f"{self._leadership.token:016d}", _encode_job(job))
        # Harmless if another leader exists by now: its token is larger than all of these.
        for token in await self._tokens(job.job_id):
            if token < self._leadership.token:
                await fs.delete(self._entry(job.job_id, token))
        self._leadership.check()

    async def end(self, job: EndedJob) -> None:
        """Records durably that this id has ended for good."""
        self._leadership.check()
        await self._write(
            f"{self._path}/ended", f"{job.job_id}.{self._leadership.token:016d}", _encode_ended(job)
        )
        self._leadership.check()

    async def forget(self, job_id: str) -> None:
        """Removes the stored data of a job that has ended and was cleaned up."""
        self._leadership.check()
        await self._remove(job_id)
        await self._host.fs.fsync_dir(f"{self._path}/jobs")

    async def _take_over(self, job_id: str, token: int) -> PersistedJob:
        mine = self._leadership.token
        if token > mine:
            raise StaleLeader(
                f"job {job_id} was stored by a leader with fencing token {token}, this one has "
                f"{mine}: stop acting"
            )
        path = self._entry(job_id, token)
        job = _decode_job(await self._read(path), path)
        if token < mine:
            await self.put(job)
        return job

    async def _ended_tokens(self) -> dict[str, int]:
        """Returns the largest token that recorded the end of a job, by job id."""
        found: dict[str, int] = {}
        for name in await self._host.fs.list(f"{self._path}/ended"):
            job_id, _, token = name.partition(".")
            if job_id and token.isdecimal():
                found[job_id] = max(found.get(job_id, 0), int(token))
        return found

    async def _read_ended(self, job_id: str, token: int) -> EndedJob:
        path = f"{self._path}/ended/{job_id}.{token:016d}"
        return _decode_ended(await self._read(path), path)

    async def _write(self, directory: str, name: str, data: bytes) -> None:
        fs, aside = self._host.fs, f"{directory}/.{self._host.ids.new('aside')}"
        await fs.write(aside, data, sync=True)
        await fs.rename(aside, f"{directory}/{name}")
        await fs.fsync_dir(directory)

    async def _remove(self, job_id: str) -> None:
        await self._host.fs.delete(f"{self._path}/jobs/{job_id}", recursive=True)

    async def _tokens(self, job_id: str) -> list[int]:
        """Returns the fencing tokens under which the job is stored, in ascending order.

        Ignores leftovers of crashes, whose names begin with a dot.
        """
        return [
            int(name)
            for name in await self._host.fs.list(f"{self._path}/jobs/{job_id}")
            if name.isdecimal()
        ]

    async def _read(self, path: str) -> bytes:
        """Returns the content of a file after checking its digest."""
        data = await self._host.fs.read(path)
        body = data[len(MAGIC) + DIGEST_BYTES :]
        if data[: len(MAGIC)] != MAGIC or data[len(MAGIC) : len(MAGIC) + DIGEST_BYTES] != _digest(
            body
        ):
            raise _unreadable(path, f"its {len(data)} bytes do not match their digest")
        return body

    def _entry(self, job_id: str, token: int) -> str:
        return f"{self._path}/jobs/{job_id}/{token:016d}"


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest()


def _seal(content: list[Any]) -> bytes:
    body: bytes = msgpack.packb(content)
    return MAGIC + _digest(body) + body


def _unreadable(path: str, why: str) -> RestoreError:
    return RestoreError(
        f"stored job {path} cannot be read: {why}; no job was recovered. Restore the file from a "
        "copy, or move it away to give up that job"
    )


def _encode_job(job: PersistedJob) -> bytes:
    return _seal(
        [job.job_id, job.name, job.graph, dict(job.config), job.status.value, job.submitted_ms]
    )


def _decode_job(body: bytes, path: str) -> PersistedJob:
    try:
        job_id, name, graph, config, status, submitted_ms = msgpack.unpackb(body)
        return PersistedJob(
            job_id=job_id,
            name=name,
            graph=graph,
            config=config,
            status=JobStatus(status),
            submitted_ms=submitted_ms,
        )
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise _unreadable(path, f"another format: {error}") from error


def _encode_ended(job: EndedJob) -> bytes:
    return _seal(
        [
            job.job_id,
            job.name,
            job.status.value,
            job.submitted_ms,
            job.ended_ms,
            job.error,
            job.savepoint,
        ]
    )


def _decode_ended(body: bytes, path: str) -> EndedJob:
    try:
        job_id, name, status, submitted_ms, ended_ms, error, savepoint = msgpack.unpackb(body)
        return EndedJob(
            job_id=job_id,
            name=name,
            status=JobStatus(status),
            submitted_ms=submitted_ms,
            ended_ms=ended_ms,
            error=error,
            savepoint=savepoint,
        )
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise _unreadable(path, f"another format: {error}") from error
