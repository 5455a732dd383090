"""Parsers of option values: numbers, ports, durations, addresses.

The error of each parser says which value is expected.
"""

from __future__ import annotations

import argparse
import socket

from aioflow.core.timeunits import to_seconds

__all__ = ["bind_address", "count", "duration", "id_beginning", "port", "positive"]

PORT_MAX = 65_535


def count(text: str) -> int:
    """Parses a command line argument: an int that is at least 0."""
    return _number(text, 0, None)


def positive(text: str) -> int:
    """Parses a command line argument: an int that is at least 1."""
    return _number(text, 1, None)


def port(text: str) -> int:
    """Parses a command line argument: a port to listen at, where 0 means any free port."""
    return _number(text, 0, PORT_MAX)


def _number(text: str, least: int, most: int | None) -> int:
    expected = (
        f"expected a number of at least {least}"
        if most is None
        else f"expected a number from {least} to {most}"
    )
    if (
        not (text.isascii() and text.isdecimal())
        or int(text) < least
        or (most is not None and int(text) > most)
    ):
        raise argparse.ArgumentTypeError(f"{expected}, got {text!r}")
    return int(text)


def duration(text: str) -> str:
    """Checks a duration above 0, and returns the text, which may be passed to another process."""
    try:
        seconds = to_seconds(text, "it")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if seconds <= 0:
        raise argparse.ArgumentTypeError(f"expected a time above 0, got {text!r}")
    return text


def id_beginning(text: str) -> str:
    """Checks that the text, a job's id or the beginning of one, is not empty."""
    if not text:
        raise argparse.ArgumentTypeError(
            "expected the id of a job, or its beginning, got nothing: see aioflow list"
        )
    return text


def bind_address(text: str) -> str:
    """Checks an address of this machine to listen at, without a port."""
    host, colon, number = text.rpartition(":")
    if colon and number.isdecimal() and ":" not in host:
        raise argparse.ArgumentTypeError(
            f"expected an address without a port, got {text!r}: the port of a jobmanager goes "
            "into --port"
        )
    try:
        socket.getaddrinfo(text, None)
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no address of this machine: {error.strerror}"
        ) from None
    return text
