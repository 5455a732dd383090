"""Streaming SQL: a query becomes operators of a flow, on expressions and aggregates of the engine.

What SQL means here is decided in decision 26, and written in this package only. Importing its
modules loads sqlglot, so they are imported at the first query.
"""
