"""Word count: how often each word stands in Genesis, and the ten words that stand there most.

A bounded flow: it reads a file, runs to the end, and is done. A global window gives its one result
when the input is over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import aioflow as af

GENESIS = Path(__file__).parent / "data" / "genesis.txt"


def words(line: str) -> Iterator[str]:
    for match in re.finditer(r"[a-z]+(?:’[a-z]+)*", line.lower()):
        yield match[0]


flow = af.Flow("wordcount", parallelism=2)
counts = (
    flow.source(af.io.lines(GENESIS), name="genesis")
    .flat_map(words)
    .key_by(lambda word: word)
    .window(af.global_window(at_end=True))
    .aggregate(af.count(), lambda word, window, n: (word, n))
)
# One key for all the counts, so that they meet in one place and can be compared.
most = (
    counts.key_by(lambda _: "all")
    .window(af.global_window(at_end=True))
    .aggregate(af.top(10, by=lambda pair: (pair[1], pair[0])))
)
most.flat_map(lambda result: result.value).map(lambda pair: f"{pair[1]:5} {pair[0]}").sink(
    af.io.stdout()
)


if __name__ == "__main__":
    af.run(flow)
