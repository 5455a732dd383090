"""Moves sealed batches between subtasks: pools, partitions, channels, gates. An event is an event;
its meaning stays outside."""
