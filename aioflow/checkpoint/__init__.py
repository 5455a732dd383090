"""Checkpoints: aligning barriers, coordinating checkpoints, and storing them.

Modules that decide are plain objects without I/O. Only the stores read and write.
"""
