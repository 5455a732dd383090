"""What is kept of a flow: the files of its state, its completed checkpoints, its savepoints.

    state/<id>                          one file of state
    checkpoints/<number>/metadata       a completed checkpoint; without metadata there is none
    savepoints/<number>-<id>/metadata   a savepoint under the store, complete in itself with state/<id> beside
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioflow.checkpoint.objects import ObjectStore
from aioflow.checkpoint.state_files import FileInput, FileOutput
from aioflow.checkpoint.urls import open_objects
from aioflow.state.handles import StateInput, StateOutput

if TYPE_CHECKING:
    from aioflow.core.host import Host

__all__ = ["FlowStore", "open_store"]


class FlowStore:
    """The store of one flow, for the processes that write and read its state, and for the one that completes its checkpoints."""

    def __init__(self, host: Host, objects: ObjectStore) -> None:
        self._host = host
        self._objects = objects

    @property
    def url(self) -> str:
        """Of the root of the flow."""
        return self._objects.url

    def output(self, directory: str = "") -> StateOutput:
        """Where a subtask writes its state: below the root, or below the directory (URL) of a savepoint, as its barrier says."""
        if directory:
            return FileOutput(self._host, open_objects(directory, self._host), absolute=True)
        return FileOutput(self._host, self._objects)

    def input(self) -> StateInput:
        """Where state is read from, wherever its handles say that it is."""
        return FileInput(self._host, self._objects)


def open_store(url: str, host: Host) -> FlowStore:
    """The store of the flow whose root is `url`, as `urls.flow_url(store, flow)` gives it. Does no I/O."""
    return FlowStore(host, open_objects(url, host))
