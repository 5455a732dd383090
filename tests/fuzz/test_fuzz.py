"""The corpora, and some thousands of inputs for each target, by a seeded generator: only
documented errors come out.
"""

from __future__ import annotations

import struct
import time
from contextlib import nullcontext

import pytest

from aioflow.core.errors import RemoteProtocolError
from aioflow.protocol.framing import CONTROL_PLANE, DATA_PLANE, FrameDecoder, FrameType
from tests.fuzz.__main__ import KEPT_BYTES_MAX, NAMES
from tests.fuzz.engine import CPU_S, Finding, Target, judge, read_corpus, run_seeded
from tests.fuzz.targets import TARGETS, data_frames, rpc_frames

RUNS = {"rest": 1_500, "csv": 1_500, "json": 3_000, "savepoint": 3_000}
RUNS_ELSE = 10_000


def test_the_command_knows_every_target() -> None:
    assert tuple(TARGETS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_corpus_is_there_and_small(name: str) -> None:
    kept = read_corpus(name)
    assert kept
    assert sum(map(len, kept)) <= KEPT_BYTES_MAX
    assert max(map(len, kept)) <= TARGETS[name].bytes_max


@pytest.mark.parametrize("name", NAMES)
def test_output_of_the_present_encoders_is_accepted(name: str) -> None:
    target = TARGETS[name]
    with target.open() as run:
        accepted = [judge(target, run, content) for content in target.seeds()]
    # A connection that says several things may contradict itself.
    assert accepted.count(False) <= len(accepted) // 4


def test_the_frames_that_inputs_are_made_of_have_every_type() -> None:
    """Fault 29 is only thrown at what it reaches."""
    seen = set()
    for plane, contents in ((DATA_PLANE, data_frames()), (CONTROL_PLANE, rpc_frames())):
        for content in contents:
            seen |= {frame.type for frame in FrameDecoder(plane).receive(content)}
    assert seen == set(FrameType) - {FrameType.SEGMENT_ID}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_inputs_never_raise_anything_but_the_errors_of_the_target(name: str) -> None:
    """Fault 29"""
    runs = RUNS.get(name, RUNS_ELSE)
    report = run_seeded(TARGETS[name], runs, seed=7)
    assert report["inputs"] == runs
    assert report["accepted"] > runs // 200


# Findings of the engine of these tests.


def of(*, raises: Exception | None = None, burns_s: float = 0.0, takes: int = 0) -> Target:
    """A target that fails in one way on an input that begins with "x"."""

    def run(content: bytes) -> None:
        if content.startswith(b"x"):
            begin = time.thread_time()
            while time.thread_time() - begin < burns_s:
                pass
            bytes(takes)  # Of zeros, which the system makes without a page of memory.
            if raises is not None:
                raise raises

    return Target("failing", lambda: nullcontext(run), (RemoteProtocolError,), lambda: [b"y"])


@pytest.mark.parametrize(
    ("target", "finding"),
    [
        (of(raises=struct.error("no")), "error: no: 7879"),
        (of(raises=RecursionError()), "RecursionError"),
        (of(burns_s=2 * CPU_S), "ms of CPU for 2 bytes"),
        (of(takes=64 << 20), "took 64 MB for 2 bytes"),
    ],
)
def test_a_target_that_fails_is_found(target: Target, finding: str) -> None:
    with target.open() as run:
        assert judge(target, run, b"yy", memory=True)
        with pytest.raises(Finding, match=finding):
            judge(target, run, b"xy", memory=True)


def test_a_target_that_refuses_an_input_passes_it() -> None:
    target = of(raises=RemoteProtocolError("no"))
    with target.open() as run:
        assert judge(target, run, b"y")
        assert not judge(target, run, b"x")
