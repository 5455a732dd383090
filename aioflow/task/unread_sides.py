"""Warns at the end of a task if a side output with a reader is empty, and one without is not.

Only the function knows its tags, so a misspelt tag is no error but an empty stream. An empty side
output alone means nothing, since most are for exceptional records.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from aioflow.core.errors import did_you_mean

if TYPE_CHECKING:
    from aioflow.core.functions import OutputTag
    from aioflow.graph.stream_graph import StreamNode

__all__ = ["tell_unread_sides"]

logger = logging.getLogger(__name__)

Sides = Collection[tuple[int, "OutputTag[Any]"]]
"""(index of the node in the chain, tag)."""


def tell_unread_sides(nodes: Sequence[StreamNode], read: Sides, sent: Sides) -> None:
    """Logs such side outputs of a task that has finished.

    `nodes` are the task's, `read`: side outputs with readers, `sent`: side outputs with records.
    """
    for index in dict.fromkeys(index for index, _ in read):
        empty = [tag.name for node, tag in read if node == index and (node, tag) not in sent]
        unread = [tag.name for node, tag in sent if node == index and (node, tag) not in read]
        if empty and unread:
            hints = [did_you_mean(name, unread) for name in empty]
            logger.log(
                logging.WARNING if any(hints) else logging.INFO,
                "operator %r sent nothing to its side output %s, which has a reader, but to %s, "
                "which has none%s",
                nodes[index].name,
                ", ".join(map(repr, empty)),
                ", ".join(map(repr, unread)),
                next(filter(None, hints), ""),
            )
