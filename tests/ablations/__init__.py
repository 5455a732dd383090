"""Guarantees and the bugs that would break them: each bug, planted in a copy of the project,
must make named tests fail.
"""
