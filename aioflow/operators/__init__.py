"""Operators: pure Python over batches.

They never see the mailbox, a channel or a checkpoint's coordinator.
"""
