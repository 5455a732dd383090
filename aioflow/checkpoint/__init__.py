"""Checkpoints: aligning barriers, coordinating checkpoints, and storing them.

The modules that decide hold plain objects without I/O. Only the stores read and write.
"""
