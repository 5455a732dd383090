"""Streaming SQL: a query becomes operators of a flow, with the engine's expressions and aggregates.

Decision 26 defines the meaning of SQL, and only this package implements it. Its modules load
sqlglot, so they are imported at the first query.
"""
