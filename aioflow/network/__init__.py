"""Moves sealed batches between subtasks: pools, partitions, channels, gates.

Events pass through; their meaning belongs to other packages.
"""
