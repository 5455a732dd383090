"""Advice about misuse: checks when a flow is built, warnings while it runs, and hints in error
messages.
"""
