"""No engine: one `for` loop in one process.

All outputs are made, and nothing is kept that could be snapshot.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, process_time
from typing import Any

from benchmarks import bare
from benchmarks.peers.metered import Arguments, arguments, peak_mb, tell
from benchmarks.peers.pools import read_events, read_words
from benchmarks.workloads import Result


def loop(given: Arguments) -> Callable[[], Result]:
    """The work, ready to be timed."""
    data, n = given.data, given.records
    match given.workload:
        case "w1" | "w6":
            words = read_words(data)
            return lambda: bare.w1(words, n)
        case "w1json":
            return lambda: bare.w1json(data / f"w1json-{n}.jsonl")
        case "w2":
            events = read_events(data)
            return lambda: bare.w2(events, n)
        case "w2json":
            return lambda: bare.w2json(data / f"w2json-{n}.jsonl", n)
        case "w3":
            return lambda: bare.w3fn(n)
        case "w4":
            words, events = read_words(data), read_events(data)
            return lambda: bare.w4(words, events, n)
    raise SystemExit(f"unknown workload {given.workload!r}")


def main() -> None:
    given = arguments()
    work = loop(given)
    at, cpu_at = monotonic(), process_time()
    outputs, checksum = work()
    taken, cpu = monotonic() - at, process_time() - cpu_at
    rates: dict[str, Any] = {
        "steady_per_s": round(given.records / taken),
        "steady_per_cpu_s": round(given.records / cpu),
    }
    tell({"outputs": outputs, "checksum": checksum, **rates, "peak_mb": round(peak_mb())})


if __name__ == "__main__":
    main()
