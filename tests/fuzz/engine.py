"""Makes inputs, judges what a target does with them, and keeps the corpora.

A target passes an input if it returns or raises one of its own errors within `CPU_S`, and takes no
more memory than `MEMORY_BYTES` and `MEMORY_FACTOR` times the input. All else is a finding: another
exception, a hang, too much memory. CPU time is that of the thread, so a busy machine does not look
like a hang.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import msgpack

__all__ = ["Finding", "Target", "judge", "mutate", "read_corpus", "run_seeded", "write_corpus"]

CORPORA = Path(__file__).parent / "corpora"

CPU_S = 0.05
TRIES = 3
"""An input that takes too long is tried again: the first call may import a module, or collect
garbage.
"""

MEMORY_FACTOR = 512
"""Bytes of Python objects for one byte of input: an empty dict is one byte of msgpack and takes
64.
"""

MEMORY_BYTES = 16 << 20
"""Besides: a reader of flat JSON has tables of 9 MB."""

MEMORY_EVERY = 16
"""Number of inputs between two measurements of memory, which slow the interpreter down."""

_LARGE = b"\x80" * 3000

HOSTILE = (
    b"",
    b"\x00",
    b"\xff" * 4,
    b"\x00" * 8,
    b"\x7f" + b"\xff" * 7,
    b"\x80" + b"\x00" * 7,
    b"\xc1",
    b"\x91" * 600,
    b"\x91" * 3000,
    b"\x81\x91" * 600,
    b"\x80" * 1000,
    b"\xdc\xff\xff" + _LARGE,
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\x92\xcf\xff\xff\xff\xff\xff\xff\xff\xff\x00",
    b"\x92\xd3\x80\x00\x00\x00\x00\x00\x00\x00\xff",
    b"\x92\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00\x01",
    b"\x92\xc3\xc2",
    b"\x91\xa2\xff\xfe",
    b"\x91\xa3\xed\xa0\x80",
    b"\x91\xd6\xff\x00\x00\x00\x00",
    b"\x91\xc7\x00\x05",
    b"\x81\x91\x01\x02",
    b"\x82\xa1a\x01\xa1a\x02",
)
"""Bytes that are hostile to msgpack, or to numbers."""

_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 127, 255, 2**31, 2**32, 2**63 - 1, 2**64 - 1, -(2**63), 0.0, -1.5,
    float("inf"), float("nan"), "", "x", "tuple", "\x00", "é", b"", b"\x01\x00\x90", [], [None],
    [[]], {}, {"a": 1}, {1: 2}, [0] * 40, "x" * 300,
)  # fmt: skip
_BYTES = (
    0,
    1,
    2,
    0x0A,
    0x20,
    0x22,
    0x2C,
    0x7F,
    0x80,
    0x90,
    0xC0,
    0xC1,
    0xC4,
    0xC7,
    0xCB,
    0xCF,
    0xD3,
    0xDB,
    0xDD,
    0xFF,
)


@dataclass(frozen=True, slots=True)
class Target:
    """One reader of bytes from outside."""

    name: str
    open: Callable[[], AbstractContextManager[Callable[[bytes], object]]]
    """Gives the function that is called with each input, and closes in the end what that needs."""
    errors: tuple[type[Exception], ...]
    """The documented errors that the reader may raise."""
    seeds: Callable[[], list[bytes]]
    """Valid inputs, made by the encoders of today."""
    mend: Callable[[bytes, Random], bytes] | None = None
    """Gives an input the checksums and lengths that its bytes ask for."""
    tokens: tuple[bytes, ...] = ()
    """Pieces that mean something to this target."""
    bytes_max: int = 8192
    """Longer inputs find little more and cost time."""
    has_threads: bool = False
    """Native threads allocate memory while it runs: CPython 3.11 does not survive that where
    tracemalloc stops.
    """


class Finding(AssertionError):
    """A target failed on an input."""


def mutate(content: bytes, rng: Random, pool: Sequence[bytes], target: Target) -> bytes:
    """Returns another input made of `content`.

    Half of them are mended, or nothing would get past a checksum.
    """
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 3, 6))):
        _change(changed, rng, pool, target.tokens)
    made = bytes(changed[: target.bytes_max])
    return target.mend(made, rng) if target.mend is not None and rng.random() < 0.5 else made


def _change(
    content: bytearray, rng: Random, pool: Sequence[bytes], tokens: Sequence[bytes]
) -> None:
    at = rng.randrange(len(content) + 1)
    end = min(len(content), at + rng.randint(1, 16))
    match rng.randrange(13):
        case 0 | 1 if at < len(content):
            content[at] ^= 1 << rng.randrange(8)
        case 2 | 3 if at < len(content):
            content[at] = rng.choice(_BYTES)
        case 4:
            del content[at:end]
        case 5:
            content[at:at] = content[rng.randrange(len(content) + 1) :][: rng.randint(1, 64)]
        case 6:
            content[at:at] = rng.randbytes(rng.randint(1, 8))
        case 7:
            content[at : rng.choice((at, end))] = rng.choice(HOSTILE)
        case 8 if tokens:
            content[at : rng.choice((at, end))] = rng.choice(tokens)
        case 9:
            other = rng.choice(pool)
            start = rng.randrange(len(other) + 1)
            content[at : rng.choice((at, end, len(content)))] = other[
                start : start + rng.choice((8, 64, 1024))
            ]
        case 10:
            size = rng.choice((1, 2, 4, 8))
            content[at : at + size] = rng.choice((0, 1, 255, 1 << 15, 1 << 31, 1 << 62)).to_bytes(
                8, "big"
            )[-size:]
        case 11 | 12:
            _replace_value(content, at, rng)


def _replace_value(content: bytearray, at: int, rng: Random) -> None:
    """Replaces one value of msgpack, if there is one at `at` or soon behind it, by another of
    msgpack.
    """
    for start in range(at, min(at + 8, len(content))):
        unpacker = msgpack.Unpacker(strict_map_key=False, raw=True)
        unpacker.feed(content[start:])
        try:
            unpacker.unpack()
        except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
            continue
        content[start : start + unpacker.tell()] = msgpack.packb(rng.choice(_VALUES))
        return


def judge(
    target: Target, run: Callable[[bytes], object], content: bytes, *, memory: bool = False
) -> bool:
    """Whether `content` is accepted; False if it is refused by an error of the target.

    Raises Finding for all else.
    """
    accepted, cpu_s = _timed(target, run, content)
    for _ in range(TRIES - 1):
        if cpu_s <= CPU_S:
            break
        cpu_s = min(cpu_s, _timed(target, run, content)[1])
    if cpu_s > CPU_S:
        raise Finding(
            f"{target.name}: took {cpu_s * 1000:.0f} ms of CPU for {len(content)} bytes: "
            f"{_shown(content)}"
        )
    if memory and not target.has_threads:
        tracemalloc.start()
        try:
            _timed(target, run, content)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        if peak > MEMORY_BYTES + MEMORY_FACTOR * len(content):
            raise Finding(
                f"{target.name}: took {peak >> 20} MB for {len(content)} bytes: {_shown(content)}"
            )
    return accepted


def _timed(target: Target, run: Callable[[bytes], object], content: bytes) -> tuple[bool, float]:
    begin = time.thread_time()
    try:
        run(content)
        accepted = True
    except target.errors:
        accepted = False
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise Finding(
            f"{target.name}: {type(error).__name__}: {error}: {_shown(content)}"
        ) from error
    return accepted, time.thread_time() - begin


def _shown(content: bytes) -> str:
    return (
        content.hex()
        if len(content) <= 2000
        else f"{content[:2000].hex()}... ({len(content)} bytes)"
    )


def read_corpus(name: str) -> list[bytes]:
    """The inputs that are kept for the target of that name."""
    path = CORPORA / f"{name}.msgpack"
    return list(msgpack.unpackb(path.read_bytes())) if path.exists() else []


def write_corpus(name: str, inputs: Iterable[bytes]) -> None:
    """Keeps `inputs` and no others."""
    CORPORA.mkdir(exist_ok=True)
    (CORPORA / f"{name}.msgpack").write_bytes(
        msgpack.packb(sorted(set(inputs), key=lambda one: (len(one), one)))
    )


def run_seeded(
    target: Target, runs: int, seed: int, seconds: float = float("inf")
) -> dict[str, Any]:
    """Judges the corpus, then `runs` inputs made from it by chance, for at most `seconds` of CPU.

    Returns counts. Raises Finding.
    """
    rng = Random(seed)
    pool = [*target.seeds(), *read_corpus(target.name)]
    with target.open() as run:
        for content in pool:
            judge(
                target, run, content
            )  # Data loaded or kept by the first call does not belong to the input.
            judge(target, run, content, memory=True)
        gc.collect()
        begin = time.process_time()
        done = accepted = 0
        while done < runs and time.process_time() - begin < seconds:
            content = mutate(rng.choice(pool), rng, pool, target)
            accepted += judge(target, run, content, memory=done % MEMORY_EVERY == 0)
            done += 1
        cpu_s = time.process_time() - begin
    return {
        "target": target.name,
        "inputs": done,
        "accepted": accepted,
        "per_s": round(done / max(cpu_s, 1e-9)),
        "kept": len(pool),
    }
