"""Moves batches of records and events between subtasks: pools, partitions, channels and gates.

This package only transports events; other packages define their meaning. Terms that the modules
share:

* Element: a batch or an event in a channel.
* Open batch: the batch to which the producer still appends records. Sealing closes the batch and
  puts it into the queue.
* Segment: 32 KiB of network memory, the space for one data frame from another process.
"""
