"""Checkpoints: aligning barriers, coordinating checkpoints, and storing them.

The classes that decide do no I/O. Only the stores read and write.
"""
