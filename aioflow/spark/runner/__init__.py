"""Bounded flows as Spark jobs."""
