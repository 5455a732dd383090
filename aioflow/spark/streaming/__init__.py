"""Unbounded flows as queries of Spark, and queries as sources."""
