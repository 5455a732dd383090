"""The mailbox of a task: one queue of actions (mails), and one loop that runs them.

The loop runs mail between the slices of its default action, which processes input.
"""
