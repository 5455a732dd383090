"""Session windows: the visits of each user, cut where nothing was clicked for half an hour.

The clicks come out of order by up to a minute, which the watermarks wait for. One comes hours late:
its session is over, so it goes to `.late`, where nothing is lost silently.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import aioflow as af

MINUTE = 60_000


class Click(NamedTuple):
    user: str
    at: int  # ms
    page: str


CLICKS = [
    Click("ann", 0 * MINUTE, "/"),
    Click("bob", 2 * MINUTE, "/pricing"),
    Click("ann", 6 * MINUTE, "/docs"),
    Click("ann", 5 * MINUTE + 30_000, "/search"),  # Out of order: belongs before /docs.
    Click("bob", 20 * MINUTE, "/signup"),
    Click("ann", 50 * MINUTE, "/"),  # 44 minutes after /docs: a new session.
    Click("bob", 49 * MINUTE + 30_000, "/welcome"),  # 29.5 minutes after /signup: still the same.
    Click("ann", 55 * MINUTE, "/docs"),
    Click("cid", 180 * MINUTE, "/"),
    Click("bob", 3 * MINUTE, "/lost"),  # Three hours late.
]


class Visit(af.ProcessWindowFunction[Click, str, str]):
    """Describes one session; `elements` are in order of arrival, so they are sorted by time."""

    def process(self, key: str, ctx: af.WindowContext, elements: Sequence[Click]) -> Iterator[str]:
        clicks = sorted(elements, key=lambda click: click.at)
        path = " ".join(click.page for click in clicks)
        yield f"{key} from minute {clicks[0].at // MINUTE:3} to {clicks[-1].at // MINUTE:3}: {path}"


flow = af.Flow("sessions", parallelism=2)
clicks = flow.source(
    CLICKS,
    watermarks=af.WatermarkStrategy.bounded_out_of_orderness(
        "1m", timestamp=lambda click: click.at
    ),
)
visits = clicks.key_by(lambda click: click.user).window(af.session("30m")).process(Visit)
late = visits.late.map(lambda click: f"too late: {click.user} {click.page}")


async def main() -> None:
    lines, lost = await flow.collect(visits, late)
    print(*sorted(lines), *lost, sep="\n")


if __name__ == "__main__":
    asyncio.run(main())
