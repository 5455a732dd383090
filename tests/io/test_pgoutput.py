"""Messages of pgoutput without a server: what they say, what is none, and the ranges of a snapshot
that was interrupted.
"""

from __future__ import annotations

import pytest

from aioflow.core.errors import MalformedInput
from aioflow.io.capture.change_reader import SnapshotRanges
from aioflow.io.capture.pgoutput import (
    UNCHANGED,
    Begin,
    Commit,
    Relation,
    RelationColumn,
    RowChange,
    Truncate,
    decode,
    lsn_number,
    lsn_text,
)
from aioflow.io.capture.postgres_types import PgType, decoder_of
from tests.fuzz.targets import pgoutput_messages


def test_messages_of_a_server_are_decoded() -> None:
    messages = [one for one in pgoutput_messages() if one[:1] not in (b"{", b"[")]
    oid = 0x4005
    assert [decode(one) for one in messages] == [
        Begin(0x19A8BE8, 0x2B4D817F1837F + 946_684_800_000_000),
        Commit(0x19A8C18),
        Relation(
            oid,
            "public",
            "t",
            "d",
            [RelationColumn("id", 23, True), RelationColumn("n", 25, False)],
        ),
        RowChange("insert", oid, None, False, [b"1", None]),
        RowChange("update", oid, None, False, [b"1", UNCHANGED]),
        RowChange("update", oid, [b"1", None], False, [b"2", b"ab"]),
        RowChange("delete", oid, [b"1", b"ab"], True, None),
        Truncate([oid, 0x400A]),
        None,
    ]


def test_a_message_that_is_cut_off_or_goes_on_is_malformed() -> None:
    for message in pgoutput_messages():
        if message[:1] in (b"{", b"[", b"Y"):
            continue
        for end in range(len(message)):
            with pytest.raises(MalformedInput):
                decode(message[:end])
        with pytest.raises(MalformedInput):
            decode(message + b"\0")


def test_places_in_the_log_are_written_as_the_server_writes_them() -> None:
    for text in ("0/16B3748", "1A/0", "0/0"):
        assert lsn_text(lsn_number(text)) == text


def test_arrays_of_domains_and_with_other_signs_are_read() -> None:
    types = {1: PgType("b", 2, 0, ";"), 2: PgType("d", 0, 3, ","), 3: PgType("d", 0, 20, ",")}
    assert decoder_of(1, types)(b"{1;{2;NULL};3}") == [1, [2, None], 3]
    assert decoder_of(1009, {})(b'[0:1]={"a\\"",b}') == ['a"', "b"]
    for broken in (b"{1", b"{1,", b'{"1', b'{"\\', b"{1}2", b"1"):
        with pytest.raises(ValueError, match=r"."):
            decoder_of(1007, {})(broken)


def test_a_change_is_left_out_if_the_range_of_its_key_was_read_later() -> None:
    ranges = SnapshotRanges([["t", [5, "b"], 100], ["t", [9, "a"], 200], ["t", None, 300]])
    assert ranges.end == 300
    for key, commit, contained in (
        ((1, "z"), 99, True),
        ((1, "z"), 100, False),
        ((5, "b"), 150, False),
        ((5, "c"), 150, True),
        ((9, "b"), 250, True),
        ((9, "b"), 300, False),
    ):
        assert ranges.contains("t", key, commit) is contained
    assert not ranges.contains("u", (1,), 1)
    assert ranges.truncates("t", 300)
    assert ranges.truncates("t", 99) is False
    assert ranges.truncates("t", 150) is None
    assert ranges.truncates("u", 1)
    again = SnapshotRanges([["t", [], 100], ["t", None, 300]])
    assert not again.contains("t", (), 50)
    assert again.truncates("t", 50)
