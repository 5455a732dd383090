"""Finds ints that belong to a chosen key group, as keys of state that holds records of many keys.

The key group of an int is the CRC-32 of its canonical bytes, the last four of which are its lowest
32 bits. Four bytes can lead a CRC from any value to any other. They are found by computing the CRC
backwards, without any search.
"""

from __future__ import annotations

from functools import cache
from zlib import crc32

from aioflow.core.keygroups import canonical_key

__all__ = ["int_in_group"]

_BITS = 32
_ONES = (1 << _BITS) - 1


def int_in_group(number: int, group: int) -> int:
    """Returns an int, at least 1, whose key group is `group`. Each `number` gives a different
    int.
    """
    head = canonical_key(number << _BITS)[:-4]
    register = crc32(head) ^ _ONES
    return number << _BITS | int.from_bytes(
        (register ^ _four_bytes_before(group)).to_bytes(4, "little"), "big"
    )


@cache
def _four_bytes_before(checksum: int) -> int:
    """Returns the CRC register that four zero bytes turn into `checksum`."""
    register = checksum ^ _ONES
    for _ in range(4):
        index = _BY_TOP[register >> 24]
        register = ((register ^ _TABLE[index]) << 8 | index) & _ONES
    return register


_TABLE = [crc32(bytes([index]), _ONES) ^ _ONES for index in range(256)]
_BY_TOP = {entry >> 24: index for index, entry in enumerate(_TABLE)}
