"""Keyed state, operator state and timers: what an operator remembers, and what a checkpoint
holds of it.
"""
