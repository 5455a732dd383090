"""Network protocols without I/O: bytes and calls go in, events and bytes come out.

The modules use no event loop, no socket and no clock. Terms that they share:

* Channel: the connection of one producing subtask with one consuming subtask.
* Element: a batch of records or an event in a channel.
* Taken over: removed from the receiver's queue by the consuming task.
* Segment, or buffer: 32 KiB of network memory at the receiver, which hold one data frame.
"""
