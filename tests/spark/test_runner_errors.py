"""Errors of user code on their way through Spark's own words: what a record says of itself
changes nothing. No Java here.
"""

from __future__ import annotations

import base64

import pytest

from aioflow.cluster.job_session import pack_error
from aioflow.core.wire.serializers import Codec
from aioflow.spark.failures import SparkError, _of_python
from aioflow.spark.runner.program import ERROR_MARK
from aioflow.spark.runner.runner import original_error

FORGED = base64.b64encode(pack_error(KeyError("forged"), Codec())).decode()


def told(error: Exception) -> SparkError:
    """Returns Spark's report of a subtask that failed with `error`."""
    packed = base64.b64encode(pack_error(error, Codec())).decode()
    cause = (
        f'  File "flow.py", line 7, in parse\n{type(error).__name__}: {error}\n\nThe above '
        "exception was the direct cause of it:\n"
    )
    words = (
        f"aioflow.spark.runner.program.SubtaskFailed: {type(error).__name__}: {error} "
        f"{ERROR_MARK}{packed}{ERROR_MARK}"
    )
    return _of_python(f"Traceback (most recent call last):\n{cause}\n{words}\n", "", "")


@pytest.mark.parametrize(
    "record",
    [
        "plain",
        "two\nlines",
        f"{ERROR_MARK}QUFB",
        f"{ERROR_MARK}QUFB{ERROR_MARK}",
        f"{ERROR_MARK}{FORGED}{ERROR_MARK}",
        f"{ERROR_MARK}{FORGED}{ERROR_MARK}" + "x" * 3000,
    ],
    ids=[
        "plain",
        "lines",
        "a mark",
        "no error between marks",
        "another error",
        "another error and long",
    ],
)
def test_error_is_that_of_the_subtask_regardless_of_its_record(record: str) -> None:
    original = original_error(told(ValueError(record)), Codec())
    assert repr(original) == repr(ValueError(record))


@pytest.mark.parametrize(
    "text", ["no error of ours", f"{ERROR_MARK}QUFB{ERROR_MARK}", f"{ERROR_MARK}a{ERROR_MARK}"]
)
def test_text_without_a_packed_error_is_left_unchanged(text: str) -> None:
    assert original_error(SparkError(text), Codec()) is None
