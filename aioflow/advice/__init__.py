"""Advice about misuse: checks when a flow is built, warnings while it runs, errors of calls."""
