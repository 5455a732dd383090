"""The mailbox: one queue of actions a task, and the one loop that runs them between slices of
its default action.
"""
