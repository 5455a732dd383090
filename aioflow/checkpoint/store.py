"""The store of a flow: state files, completed checkpoints and savepoints, and marks that say which
checkpoints may be resumed.

    state/<id>                      one file of state
    checkpoints/<number>/metadata   a completed checkpoint: written last; without it there is none
    savepoints/<id>/...             a savepoint: a directory complete in itself, `metadata` beside
                                    `state/<id>`; it may be anywhere else too
    taken/<number>                  the location of savepoint <number>, written after its metadata.
                                    Each savepoint under the root has one. So has each savepoint
                                    that ended a job, wherever it is, because nothing older may be
                                    resumed. Also, under a number of its own, the location of the
                                    checkpoint that the user told a job to begin with
    lease/<number>                  which job runs the flow (`lease`)
    finished/<number>               checkpoints up to this number are not resumed: their jobs were
                                    given up
    ended/<number>                  the job came to its end by itself with checkpoint <number>: a
                                    run from there has nothing to do
    left/<number>                   checkpoint <number> is resumed only on request, because a job
                                    went back to an older one

Numbers grow over the whole life of a flow. The metadata of a checkpoint names state files relative
to the root of the flow. The metadata of a savepoint names state files relative to the savepoint's
own directory, so a savepoint can be moved. In memory, files of savepoints are named by URL.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from aioflow.checkpoint.completed import CheckpointKind, CompletedCheckpoint, Discard, files_of
from aioflow.checkpoint.lease import FlowLease, LeaseOptions, ObjectLeases
from aioflow.checkpoint.metadata import (
    decode_metadata,
    encode_metadata,
    map_files,
    rename_files,
    seal,
    shown,
    unseal,
)
from aioflow.checkpoint.objects import ObjectStore, to_the_end
from aioflow.checkpoint.state_files import FileInput, FileOutput, Places
from aioflow.checkpoint.urls import join_url, local_path, open_objects
from aioflow.core.errors import CheckpointError, RestoreError
from aioflow.state.snapshot import StateFile, StateInput, StateOutput, whole

if TYPE_CHECKING:
    from aioflow.core.host import Host

__all__ = ["METADATA", "RESTORE_ONLY", "FlowStore", "open_store", "read_checkpoint"]

logger = logging.getLogger(__name__)

METADATA = "metadata"
"""Name of the file that makes a directory a checkpoint."""

RESTORE_ONLY = "memory://nothing-is-written"
"""URL of the store of a job that takes no checkpoints. Such a job restores files that are named by
URL."""

REMOTE_LEASE = LeaseOptions(lease_s=60.0, renew_s=15.0, stop_s=10.0)
"""Options of a lease in an object store, where each request costs time and money."""


class FlowStore:
    """The store of one flow, for the processes that write and read its state.

    The holder of the flow's lease also completes its checkpoints. Methods that write raise
    CheckpointError, and methods that read raise RestoreError. Both errors name the flow, the
    checkpoint and the place.
    """

    def __init__(self, host: Host, objects: ObjectStore, key: bytes | None = None) -> None:
        self._host = host
        self._objects = objects
        self._key = key
        self._in_doubt: list[tuple[ObjectStore, str, bytes]] = []
        self._unwanted: dict[str, None] = {}
        """URLs of discarded checkpoints whose metadata is not removed yet."""
        self._lease: FlowLease | None = None
        self._seen: frozenset[str] = frozenset()
        """Names of the state files of the last checkpoint, which this process has found in the
        store."""

    @property
    def url(self) -> str:
        """URL of the root of the flow."""
        return self._objects.url

    @property
    def objects(self) -> ObjectStore:
        """The objects under the root."""
        return self._objects

    # Subtasks.

    def output(self, directory: str = "") -> StateOutput:
        """Returns the output to which a subtask writes its state.

        The output writes below the root of the flow, or below the URL `directory`. The barrier of a
        savepoint names this URL.
        """
        if directory:
            return FileOutput(self._host, open_objects(directory, self._host), absolute=True)
        return FileOutput(self._host, self._objects)

    def input(self) -> StateInput:
        """Returns the input that reads state files."""
        return FileInput(self._host, self._objects)

    # The job that holds the lease.

    async def hold(
        self, on_lost: Callable[[CheckpointError], None], options: LeaseOptions | None = None
    ) -> FlowLease:
        """Acquires the lease of this flow, so that this process may complete checkpoints.

        The caller releases the lease. Raises CheckpointError, naming the holder, if another job has
        the lease. `on_lost` is called if the lease cannot be renewed, and must stop the job.
        """
        if options is None:
            options = (
                LeaseOptions() if self.url.startswith(("file://", "memory://")) else REMOTE_LEASE
            )
        lease = FlowLease(
            self._host,
            ObjectLeases(self._objects, "lease"),
            f"the flow at {self.url}",
            on_lost,
            options,
        )
        await lease.acquire()
        self._lease = lease
        try:
            # The newest checkpoint is resumed, and its prepared data is committed: it must survive
            # the next loss of power.
            await self._objects.harden()
        except BaseException as error:
            await lease.release()
            if isinstance(error, OSError):
                raise CheckpointError(
                    f"the files in {self.url} cannot be made durable: {error}"
                ) from error
            raise
        return lease

    def savepoint_url(self, directory: str | None = None) -> str:
        """Returns a URL for a new savepoint: under the root, or below `directory` (a URL)."""
        drawn = self._host.ids.new("savepoint")
        if directory is None:
            return join_url(self.url, f"savepoints/{drawn}")
        return join_url(open_objects(directory, self._host).url, f"savepoint-{drawn}")

    async def complete(self, checkpoint: CompletedCheckpoint) -> CompletedCheckpoint:
        """Stores the metadata of a checkpoint or savepoint, and thereby makes it the newest one.

        Returns the checkpoint with its `location` once it is durable. After a CheckpointError the
        checkpoint does not exist, and never will. If the store does not answer, a later `settle`
        ensures this. Only if the lease was lost meanwhile may the checkpoint exist; the new holder
        of the lease then decides.
        """
        await self._confirm_lease()
        await self.settle()
        if not checkpoint.kind.is_savepoint:
            own = rename_files(checkpoint, lambda name: self._own_name(checkpoint, name))
            seen = await self._see_files(own, self._objects, self._seen)
            name = f"checkpoints/{checkpoint.checkpoint_id}"
            await self._put(
                checkpoint, self._objects, f"{name}/{METADATA}", encode_metadata(own, self._key)
            )
            self._seen = seen
            return replace(checkpoint, location=join_url(self.url, name))
        if not checkpoint.directory:
            raise CheckpointError(
                f"{shown(checkpoint)} has no directory, expected a new one from savepoint_url"
            )
        saved = open_objects(checkpoint.directory, self._host)
        complete = await self._with_copies(checkpoint, saved.url)
        own = rename_files(complete, lambda name: _relative_name(complete, name, saved.url))
        await self._see_files(own, saved)
        data = encode_metadata(own, self._key)
        await self._put(checkpoint, saved, METADATA, data)
        location = (
            saved.url[len(self.url) + 1 :] if saved.url.startswith(f"{self.url}/") else saved.url
        )
        if location != saved.url or checkpoint.kind is CheckpointKind.SYNC_SAVEPOINT:
            entry = seal([location, checkpoint.kind.value], self._key)
            try:
                await self._put(
                    checkpoint, self._objects, f"taken/{checkpoint.checkpoint_id}", entry
                )
            except (CheckpointError, asyncio.CancelledError):
                await self._withdraw(saved, METADATA, data)
                raise
        return replace(complete, location=saved.url)

    async def _see_files(
        self, own: CompletedCheckpoint, objects: ObjectStore, seen: frozenset[str] = frozenset()
    ) -> frozenset[str]:
        """Returns the names of the state files of `own`, if this process finds them all in
        `objects`.

        Otherwise raises CheckpointError, because another machine has written to a different
        directory with the same path. Files with a name in `seen` are not looked up.
        """
        names = frozenset(files_of(own.subtasks.values()))
        new = sorted(names - seen)
        try:
            missing = await objects.missing(new) if new else []
        except OSError as error:
            raise CheckpointError(
                f"{shown(own)}: its state files in {objects.url} cannot be looked up: {error}"
            ) from error
        if missing:
            raise CheckpointError(
                f"{shown(own)} could not be restored: {len(missing)} of its state files, such as "
                f"{missing[0]}, are not in {objects.url} on this machine. Another machine wrote "
                "them to a directory of its own: expected a directory that all machines share, or "
                "an object store"
            )
        return names

    async def _with_copies(
        self, savepoint: CompletedCheckpoint, directory: str
    ) -> CompletedCheckpoint:
        """Copies the state of subtasks that had finished before the savepoint into the savepoint's
        `directory`.

        A savepoint must be complete in itself. Returns `savepoint` with references to the copies.
        """
        elsewhere: dict[str, StateFile] = {}

        def note(file: StateFile) -> StateFile:
            if file.content is None and not file.name.startswith(f"{directory}/"):
                elsewhere[file.name] = file
            return file

        map_files(savepoint, note)
        output, source = self.output(directory), self.input()
        try:
            copies = {
                name: await output.write(whole(await source.read(file)))
                for name, file in elsewhere.items()
            }
        except (OSError, RestoreError) as error:
            what = "the state of tasks that finished before it cannot be copied"
            raise CheckpointError(f"{shown(savepoint)}: {what}: {error}") from error
        return map_files(
            savepoint,
            lambda file: file if file.content is not None else copies.get(file.name, file),
        )

    async def settle(self) -> None:
        """Deletes metadata that failed writes may have left.

        Call this method before a job goes back to an older checkpoint. Raises CheckpointError if
        the store fails, or if the lease is lost: its new holder may have started from a checkpoint
        with such metadata.
        """
        if self._in_doubt:
            await self._confirm_lease()
            await self._settle()

    async def _settle(self) -> None:
        while self._in_doubt:
            if self._lease is not None:
                self._lease.check()
            doubt = objects, name, data = self._in_doubt[-1]
            try:
                await _remove_own(objects, name, data)
            except OSError as error:
                raise CheckpointError(
                    f"{join_url(objects.url, name)} may hold a checkpoint that was given up, and "
                    f"cannot be removed: {error}"
                ) from error
            if doubt in self._in_doubt:
                # A concurrent call may have removed it, or added further ones.
                self._in_doubt.remove(doubt)

    async def discard(self, discard: Discard) -> None:
        """Deletes checkpoints and files that are no longer needed, metadata first.

        If the store fails, `sweep` deletes the rest later. Without the lease nothing is deleted.
        Another job may then have begun with a checkpoint that this process gave up, but that was
        stored nevertheless.
        """
        places = Places(self._host, self._objects)
        # Without a location nothing was stored, or `settle` has removed it.
        self._unwanted.update(
            (checkpoint.location, None) for checkpoint in discard.checkpoints if checkpoint.location
        )
        try:
            await self._confirm_lease()
            await self.settle()
            # Includes metadata that an earlier call could not delete: it may refer to files that
            # are deleted now.
            for location in list(self._unwanted):
                objects, name = places.find(join_url(location, METADATA))
                await objects.delete([name])
                self._unwanted.pop(location, None)
            by_place: dict[str, tuple[ObjectStore, list[str]]] = {}
            for name in discard.files:
                objects, inner = places.find(name)
                by_place.setdefault(objects.url, (objects, []))[1].append(inner)
            for objects, inners in by_place.values():
                await objects.delete(inners)
        except (OSError, CheckpointError, RestoreError) as error:
            logger.warning(
                "files in %s that are no longer needed could not be deleted: %s", self.url, error
            )

    async def finish(self, number: int) -> None:
        """Marks all checkpoints up to `number` as not to be resumed, because a new job begins
        without them.

        Raises CheckpointError if the store fails.
        """
        try:
            if number not in await self._numbers("finished"):
                await self._objects.create(f"finished/{number}", whole(b""))
            await self._objects.delete(
                [f"finished/{older}" for older in await self._numbers("finished") if older < number]
            )
            for kind in ("left", "ended"):
                await self._objects.delete(
                    [f"{kind}/{older}" for older in await self._numbers(kind) if older <= number]
                )
        except OSError as error:
            raise CheckpointError(
                f"{self.url} cannot keep that a job begins without it: {error}"
            ) from error

    async def end(self, number: int) -> None:
        """Marks that the job came to its end by itself, with checkpoint `number`, which is kept.

        Raises CheckpointError if the store fails.
        """
        try:
            await self._objects.create(f"ended/{number}", whole(b""))
            await self._objects.delete(
                [f"ended/{older}" for older in await self._numbers("ended") if older < number]
            )
        except (OSError, RestoreError) as error:
            raise CheckpointError(
                f"{self.url} cannot keep that its job has ended: {error}"
            ) from error

    async def ended_ms(self, found: CompletedCheckpoint) -> int | None:
        """Returns the wall-clock time in ms at which a job ended by itself with checkpoint `found`.

        Returns None if the job did not end in this way.
        """
        if found.kind.is_savepoint or found.location != join_url(
            self.url, f"checkpoints/{found.checkpoint_id}"
        ):
            return None
        try:
            return await self._objects.modified_ms(f"ended/{found.checkpoint_id}")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RestoreError(
                f"{self.url} cannot be searched for the end of its job: {error}"
            ) from error

    async def leave_behind(self, number: int) -> None:
        """Marks that a job goes back to checkpoint `number`, so that `newest` ignores all later
        checkpoints.

        Sinks drop the data that they prepared after that checkpoint. So a later savepoint could not
        be resumed: the data that its sinks would have to commit is gone. The mark is durable on
        return. Raises CheckpointError if the store fails.
        """
        await self._confirm_lease()
        try:
            left = await self._numbers("left")
            above = {*await self._numbers("taken"), *await self._numbers("checkpoints")}
            for one in sorted(above.difference(left)):
                if one > number:
                    await self._objects.create(f"left/{one}", whole(b""))
        except (OSError, RestoreError) as error:
            raise CheckpointError(
                f"{self.url} cannot keep that its job goes back to {number}: {error}"
            ) from error

    async def begin_with(self, found: CompletedCheckpoint, number: int) -> None:
        """Marks that the user told a job to begin with `found`.

        `newest` returns only that checkpoint until the job completes its own first checkpoint.
        Sinks drop the data that was prepared after `found`, as in `leave_behind`. `number` is the
        number of the mark, and must be larger than all numbers in use. The mark is durable on
        return. Raises CheckpointError if the store fails.
        """
        if (
            found.location.startswith(f"{self.url}/")
            and found.checkpoint_id > await self.finished()
        ):
            await self.leave_behind(found.checkpoint_id)
            return
        await self._confirm_lease()
        try:
            taken = await self._numbers("taken")
            if (
                not taken
                or taken[-1] < await self.highest()
                or (await self._taken(taken[-1]))[0] != found.location
            ):
                entry = seal([found.location, found.kind.value, found.checkpoint_id], self._key)
                await self._put(found, self._objects, f"taken/{number}", entry)
        except RestoreError as error:
            raise CheckpointError(
                f"{self.url} cannot keep that its job begins with {found.location}: {error}"
            ) from error

    # Searching.

    async def newest(self, *, fall_back: bool = False) -> CompletedCheckpoint | None:
        """Returns the newest completed checkpoint or savepoint that is not abandoned.

        Returns None if there is none, or if `finish` has given it up. A job that goes back to an
        older checkpoint abandons the newer ones (`leave_behind`).

        Raises RestoreError if the checkpoint cannot be read. With `fall_back`, an older checkpoint
        is returned instead, with a warning: sinks would then commit data again that they have
        committed after that older checkpoint. A missing savepoint is skipped if it did not end its
        job, because sinks committed nothing when it completed.
        """
        finished = await self.finished()
        savepoints = await self._numbers("taken")
        left = await self._numbers("left")
        numbers = sorted(
            {*savepoints, *await self._numbers("checkpoints")}.difference(left), reverse=True
        )
        refused = False
        for number in numbers:
            if number <= finished:
                break
            try:
                if number not in savepoints:
                    return await self.checkpoint(number)
                url, kind, inside = await self._taken(number)
                if (
                    kind is CheckpointKind.SAVEPOINT
                    and inside == number
                    and not await self._has_metadata(url)
                ):
                    continue
                return await self._read(url, inside)
            except RestoreError as error:
                if not fall_back:
                    raise RestoreError(
                        f"the newest checkpoint in {self.url} cannot be restored, and no older "
                        f"one is taken in its place by itself: {error}"
                        ". Put it back where it was, name one that is there by restore=, or begin "
                        "without any: restore=None, fresh=True"
                    ) from error
                logger.warning("an older checkpoint is taken: %s", error)
                refused = True
        if refused:
            raise RestoreError(
                f"no checkpoint in {self.url} can be restored: the log says why, of each"
            )
        return None

    async def highest(self) -> int:
        """Returns the largest checkpoint number in use, 0 if there is none. A new job uses larger
        numbers.
        """
        return max(
            [
                await self.finished(),
                *await self._numbers("taken"),
                *await self._numbers("checkpoints"),
            ]
        )

    async def finished(self) -> int:
        """Returns the number up to which no checkpoint is resumed, because `finish` has given these
        checkpoints up.

        Returns 0 if there are none.
        """
        return max(await self._numbers("finished"), default=0)

    async def checkpoints(self) -> list[int]:
        """Returns the numbers of the completed checkpoints, ascending, without savepoints."""
        return await self._numbers("checkpoints")

    async def left_behind(self) -> list[int]:
        """Returns the numbers of the checkpoints that are resumed only on request, ascending.

        A job went back from these checkpoints to an older checkpoint.
        """
        return await self._numbers("left")

    async def checkpoint(self, number: int) -> CompletedCheckpoint:
        """Returns the completed checkpoint `number`. Raises RestoreError if it cannot be read."""
        return await self._read(join_url(self.url, f"checkpoints/{number}"), number)

    async def savepoints(self) -> list[str]:
        """Returns the URLs of the savepoints under the root, oldest first."""
        found = []
        for number in await self._numbers("taken"):
            url, _, inside = await self._taken(number)
            if (
                inside == number
                and url.startswith(f"{self.url}/")
                and await self._has_metadata(url)
            ):
                found.append(url)
        return found

    async def _numbers(self, kind: str) -> list[int]:
        """Returns the numbers in the names `<kind>/<number>` or `<kind>/<number>/metadata`,
        ascending.
        """
        try:
            names = [name.split("/") for name in await self._objects.names(kind)]
        except OSError as error:
            raise RestoreError(f"{self.url} cannot be searched for {kind}: {error}") from error
        return sorted(
            int(parts[1])
            for parts in names
            if len(parts) > 1 and parts[1].isdecimal() and parts[2:] in ([], [METADATA])
        )

    async def _has_metadata(self, url: str) -> bool:
        try:
            await open_objects(url, self._host).modified_ms(METADATA)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise RestoreError(f"{url} cannot be searched for a savepoint: {error}") from error
        return True

    async def _read(self, url: str, number: int) -> CompletedCheckpoint:
        stored = await read_checkpoint(url, self._host, self._key, root=self._objects)
        if stored.checkpoint_id != number:
            raise RestoreError(
                f"{url} holds {shown(stored)}, expected number {number}: files were moved"
            )
        return stored

    async def _taken(self, number: int) -> tuple[str, CheckpointKind, int]:
        """Returns the URL and kind of the savepoint or checkpoint that `taken/<number>` names, and
        the checkpoint number in its metadata.

        The number may differ from `number` if a job was told to begin with that savepoint.
        """
        where = join_url(self.url, f"taken/{number}")
        try:
            content = unseal(await self._objects.read(f"taken/{number}"), where, self._key)
        except OSError as error:
            raise RestoreError(f"{where} cannot be read: {error}") from error
        match content:
            case [str(location), CheckpointKind.SAVEPOINT | CheckpointKind.SYNC_SAVEPOINT as kind]:
                return (
                    location if "://" in location else join_url(self.url, location),
                    CheckpointKind(kind),
                    number,
                )
            case [
                str(location),
                CheckpointKind.CHECKPOINT
                | CheckpointKind.SAVEPOINT
                | CheckpointKind.SYNC_SAVEPOINT as kind,
                int(inside),
            ]:
                return location, CheckpointKind(kind), inside
            case _:
                raise RestoreError(
                    f"{where} does not say where a savepoint is: it is damaged, restore it from a "
                    "copy"
                )

    def _own_name(self, checkpoint: CompletedCheckpoint, name: str) -> str:
        own = name[len(self.url) + 1 :] if name.startswith(f"{self.url}/state/") else name
        if "://" in own:
            raise CheckpointError(
                f"{shown(checkpoint)} refers to {name}, which is not in {self.url}: the first "
                "after a restored savepoint must be full"
            )
        return own

    # Writing.

    async def _put(
        self, checkpoint: CompletedCheckpoint, objects: ObjectStore, name: str, data: bytes
    ) -> None:
        """Creates `name`, the metadata object of a checkpoint, with the content `data`. Removes the
        object after a failure."""
        where = join_url(objects.url, name)
        try:
            # The object may be ours despite False, if a reply was lost and the request repeated.
            created = (
                await to_the_end(objects.create(name, whole(data)))
                or await objects.read(name) == data
            )
            # If the write took too long, another job may have begun without it: it must not count.
            await self._confirm_lease()
        except (OSError, asyncio.CancelledError) as error:
            await self._withdraw(objects, name, data)
            if isinstance(error, OSError):
                raise CheckpointError(
                    f"{shown(checkpoint)} could not be stored at {where}: {error}"
                ) from error
            raise
        if not created:
            raise CheckpointError(
                f"{shown(checkpoint)} could not be stored: {where} exists, expected a new number: "
                "is another job there?"
            )

    async def _confirm_lease(self) -> None:
        """Raises CheckpointError if another job has the lease. Renews a lease that is late."""
        if self._lease is not None:
            await self._lease.confirm()

    async def _withdraw(self, objects: ObjectStore, name: str, data: bytes) -> None:
        """Deletes the object `name` if its content is `data`: at once, or in a later `settle` if
        the store fails."""
        self._in_doubt.append((objects, name, data))
        try:
            await self._settle()
        except CheckpointError as error:
            logger.warning("%s", error)


async def _remove_own(objects: ObjectStore, name: str, data: bytes) -> None:
    """Deletes an object only if its content is `data`, because another writer may have created the
    object meanwhile.
    """
    try:
        if await objects.read(name) == data:
            await objects.delete([name])
    except (FileNotFoundError, NotADirectoryError):
        pass


def open_store(url: str, host: Host, key: bytes | None = None) -> FlowStore:
    """Returns the store of the flow whose root is `url` (see `urls.flow_url`). Does no I/O.

    With a `key`, metadata is written with a MAC. Metadata without a valid MAC is refused.
    """
    return FlowStore(host, open_objects(url, host), key)


async def _holds_any(url: str, host: Host) -> bool:
    """Whether something is stored below `url`. A directory of this machine is not walked through,
    because it may be any directory and hold millions of files.
    """
    path = local_path(url)
    if path is None:
        return bool(await open_objects(url, host).names())
    try:
        return bool(await host.fs.list(path))
    except FileNotFoundError:
        return False


async def read_checkpoint(
    url: str, host: Host, key: bytes | None = None, *, root: ObjectStore | None = None
) -> CompletedCheckpoint:
    """Reads the checkpoint or savepoint whose directory is `url`, a URL or a path.

    The state files in the result are named by URL, or relative to `root` if they are below `root`.
    Raises RestoreError if nothing can be read.
    """
    objects, name = open_objects(url, host), METADATA
    location = objects.url
    where = join_url(location, METADATA)
    if root is not None and location.startswith(f"{root.url}/"):
        objects, name = root, where[len(root.url) + 1 :]
    try:
        data = await objects.read(name)
    except (FileNotFoundError, NotADirectoryError) as error:
        what = "it is no directory"
        if not isinstance(error, NotADirectoryError):
            with suppress(OSError):
                what = (
                    f"it has no file {METADATA!r}"
                    if await _holds_any(location, host)
                    else "there is nothing"
                )
        raise RestoreError(
            f"{location} is no checkpoint or savepoint: {what}; expected the directory of a "
            "savepoint, as job.savepoint() and job.stop() "
            "return it, or of a checkpoint, which is checkpoints/NUMBER under the flow in its store"
        ) from error
    except OSError as error:
        raise RestoreError(f"{where} cannot be read: {error}") from error
    checkpoint = decode_metadata(data, where, key)
    base = location
    if not checkpoint.kind.is_savepoint:
        base, found, _ = location.rpartition("/checkpoints/")
        if not found:
            raise RestoreError(
                f"{where} is of a checkpoint, which cannot be moved away from its store: take a "
                "savepoint for that"
            )
    if root is None or base != root.url:
        checkpoint = rename_files(checkpoint, lambda name: join_url(base, name))
    return replace(
        checkpoint, location=location, directory=location if checkpoint.kind.is_savepoint else ""
    )


def _relative_name(checkpoint: CompletedCheckpoint, name: str, directory: str) -> str:
    if not name.startswith(f"{directory}/state/"):
        raise CheckpointError(
            f"{shown(checkpoint)} refers to {name}, which is not in {directory}: a savepoint must "
            "be complete in itself"
        )
    return name[len(directory) + 1 :]
