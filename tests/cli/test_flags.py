"""Errors of the library name its arguments; those of a command name what was typed."""

from __future__ import annotations

import pytest

from aioflow.cli.options import in_flags


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (
            "every= is about checkpoints: give checkpoints=URL too",
            "--every is about checkpoints: give --checkpoints URL too",
        ),
        (
            "every is '0s', expected more than nothing",
            "--every is '0s', expected more than nothing",
        ),
        ("restore='latest' looks into a store", "--restore latest looks into a store"),
        ("x; did you mean restore='latest'?", "x; did you mean --restore latest?"),
        (
            "begin without that state with allow_non_restored=True",
            "begin without that state with --allow-non-restored",
        ),
        (
            "to begin again, start with restore=None, fresh=True",
            "to begin again, start with --fresh",
        ),
        (
            "monitor='0.0.0.0:80' expected a token: give token=, or",
            "--monitor 0.0.0.0:80 expected a token: give --monitor-token-file, or",
        ),
        ('give monitor="HOST:PORT" too', "give --monitor HOST:PORT too"),
        ("give restore=PATH, or checkpoints=URL", "give --restore PATH, or --checkpoints URL"),
        (
            "name that of the cluster by secret=Path(...).",
            "name that of the cluster by --secret-file FILE.",
        ),
        (
            "workers=2 with slots=1 have 2, or workers=4,",
            "--workers 2 with slots=1 have 2, or --workers 4,",
        ),
        (
            "memory://a is in one process: give checkpoints= a directory",
            "memory://a is in one process: give --checkpoints a directory",
        ),
    ],
)
def test_arguments_become_flags(message: str, shown: str) -> None:
    assert in_flags(message) == shown


@pytest.mark.parametrize(
    "message",
    [
        "restart=af.no_restart() is not offered",
        "s3://bucket?every=1&fresh=True cannot be reached",
        "checkpoints of job 7 are kept every 10s in the store",
        "my_every=1 and x-token=2 are the user's",
        "file:///a/restore cannot be read",
    ],
)
def test_other_flags_stay(message: str) -> None:
    assert in_flags(message) == message
