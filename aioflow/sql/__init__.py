"""Streaming SQL: a query becomes operators of a flow, on expressions and aggregates of the engine.

Decision 26 defines the meaning of SQL, and only this package implements it. Its modules load
sqlglot, so they are imported at the first query.
"""
