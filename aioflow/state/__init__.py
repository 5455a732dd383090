"""Keyed state, operator state and timers, and their snapshots in checkpoints."""
