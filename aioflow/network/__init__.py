"""Moves batches of records and events between subtasks: pools, partitions, channels and gates.

Events pass through; their meaning belongs to other packages. Terms that the modules share:

* Element: a batch or an event in a channel.
* Open batch: the batch that the producer still appends to. Sealing it ends that and queues it.
* Permit: the right to one queued batch, granted by the pool of a partition or gate.
"""
