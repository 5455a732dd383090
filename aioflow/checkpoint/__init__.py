"""Checkpoints: alignment of barriers, the coordinator, the store.

Decisions are plain objects; only the stores do I/O.
"""
