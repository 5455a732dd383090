"""Batch inference: a model that is cheapest for many elements at once, fed from a stream of single
ones.

`map_batches` gathers up to `max_size` elements, waits at most `max_wait` for them, and calls the
model in a thread, so that the loop stays free. One result comes back for each element, in order.
The model is a resource: it is loaded once.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator

import aioflow as af

REVIEWS = [
    "good, very good",
    "bad food",
    "good wine, bad chairs",
    "no words",
    "very bad, bad, bad",
] * 60
WEIGHTS = {"good": 1, "bad": -1, "very": 0}


class Model:
    """Stands for something dear to load, such as a neural network: it sees a whole batch a call."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def scores(self, texts: list[str]) -> list[int]:
        assert threading.current_thread() is not threading.main_thread()
        self.batches.append(len(texts))
        return [sum(WEIGHTS.get(word.strip(","), 0) for word in text.split()) for text in texts]


@af.resource
def model() -> Iterator[Model]:
    loaded = Model()
    yield loaded
    print(
        f"{len(REVIEWS)} reviews in {len(loaded.batches)} batches of at most {max(loaded.batches)}"
    )


def judge(texts: list[str], model: Model = af.use(model)) -> list[tuple[str, int]]:
    return list(zip(texts, model.scores(texts), strict=True))


flow = af.Flow("batch inference")
judged = flow.source(REVIEWS).map_batches(judge, max_size=64, max_wait="50ms", blocking=True)


async def main() -> None:
    opinions = Counter(
        "good" if score > 0 else "bad" if score < 0 else "neither"
        for _, score in await judged.collect()
    )
    for opinion, count in opinions.most_common():
        print(f"{opinion}: {count}")


if __name__ == "__main__":
    asyncio.run(main())
