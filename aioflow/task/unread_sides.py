"""What a task can say of side outputs at its end: that one is read and got nothing, while another
got something and nobody reads it.

Which tags a function sends to is known by nobody but the function, so a misspelt tag is no error:
it is a stream that stays empty. An empty side output alone means nothing, since most of them are
for what should not happen.
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
    """`nodes` are those of a task that came to its end, `read` its side outputs with readers,
    `sent` those that its operators sent to.
    """
    for index in dict.fromkeys(index for index, _ in read):
        empty = [tag.name for node, tag in read if node == index and (node, tag) not in sent]
        unread = [tag.name for node, tag in sent if node == index and (node, tag) not in read]
        if empty and unread:
            hints = [did_you_mean(name, unread) for name in empty]
            logger.log(
                logging.WARNING if any(hints) else logging.INFO,
                "operator %r sent nothing to its side output %s, which is read, but to %s, which "
                "nobody reads%s",
                nodes[index].name,
                ", ".join(map(repr, empty)),
                ", ".join(map(repr, unread)),
                next(filter(None, hints), ""),
            )
