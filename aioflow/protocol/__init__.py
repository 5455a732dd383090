"""Network protocols without I/O: bytes and calls go in, events and bytes come out.

The modules use no event loop, no socket and no clock. Terms that they share:

* Channel: the logical connection of one producing subtask with one consuming subtask.
* Element: a batch of records or an event in a channel.
* Taken over: an element is taken over when the consuming task removes it from the receiver's queue.
* Segment, or buffer: 32 KiB of network memory at the receiver, the space for one data frame.
"""
