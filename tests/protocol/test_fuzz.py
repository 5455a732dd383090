"""Malformed frames, all the way through decoder, exchange, RPC and batch codec: RemoteProtocolError or nothing."""

from __future__ import annotations

import time

from aioflow.protocol.framing import CONTROL_PLANE, DATA_PLANE, FrameDecoder, FrameType
from benchmarks.fuzz_frames import Victim, corpus, fuzz

INPUTS = 100_000


def test_the_corpus_has_every_type_of_frame_and_is_valid() -> None:
    """Fault 29 is only thrown at what it reaches."""
    seen = set()
    for plane, contents in zip((DATA_PLANE, CONTROL_PLANE), corpus(), strict=True):
        for content in contents:
            seen |= {frame.type for frame in FrameDecoder(plane).receive(content)}
    assert seen == set(FrameType) - {FrameType.SEGMENT_ID, FrameType.HELLO}


def test_mutated_frames_never_raise_anything_but_a_protocol_error() -> None:
    """Fault 29"""
    report = fuzz(INPUTS, seed=7, clock=time.thread_time)
    assert report["inputs"] == INPUTS
    assert report["refused"] > INPUTS // 10
    assert report["accepted"] > INPUTS // 10
    # Every type got past the checks of the frame, so its handler was tried.
    assert set(FrameType) - {FrameType[name] for name in report["frames_past_the_crc"]} <= {FrameType.SEGMENT_ID, FrameType.HELLO}


def test_a_frame_after_a_flood_of_wrong_ones_is_still_served() -> None:
    victim = Victim()
    data, _ = corpus()
    for content in data:
        [frame] = FrameDecoder(DATA_PLANE).receive(content)
        victim.receive_data(frame)
    assert victim.pool.in_use == 0
