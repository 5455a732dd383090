"""The monitoring endpoint of jobs.

It serves Flink-compatible REST, Prometheus metrics, events and a dashboard over a read-only view of
jobs.
"""
