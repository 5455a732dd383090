"""Unbounded flows as streaming queries of Spark, and streaming queries as sources."""
