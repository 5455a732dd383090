"""The mailbox: one queue of actions per task, and one loop that runs them.

The loop runs mail between slices of its default action.
"""
