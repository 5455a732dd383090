"""Ints that fall into a key group of choice, for what stands in keyed state under no key of a
record.

The key group of an int is CRC-32 of its canonical bytes, the last four of which are its lowest 32
bits. Four bytes lead a CRC from whatever it is to whatever it is to be, and which they are is found
by computing it backwards: nothing is tried, and nothing is remembered.
"""

from __future__ import annotations

from functools import cache
from zlib import crc32

from aioflow.core.keygroups import canonical_key

__all__ = ["int_in_group"]

_BITS = 32
_ONES = (1 << _BITS) - 1


def int_in_group(number: int, group: int) -> int:
    """An int of this key group, another for each `number`, which is 1 or more."""
    head = canonical_key(number << _BITS)[:-4]
    register = crc32(head) ^ _ONES
    return number << _BITS | int.from_bytes(
        (register ^ _four_bytes_before(group)).to_bytes(4, "little"), "big"
    )


@cache
def _four_bytes_before(checksum: int) -> int:
    """The register of a CRC which four bytes of zero bring to `checksum`."""
    register = checksum ^ _ONES
    for _ in range(4):
        index = _BY_TOP[register >> 24]
        register = ((register ^ _TABLE[index]) << 8 | index) & _ONES
    return register


_TABLE = [crc32(bytes([index]), _ONES) ^ _ONES for index in range(256)]
_BY_TOP = {entry >> 24: index for index, entry in enumerate(_TABLE)}
