"""Operators: pure Python over batches.

They never access the mailbox, a channel or the checkpoint coordinator.
"""
