"""Nexmark: people, auctions and bids, and the queries over them, as flows that are held against
DuckDB and then timed.
"""
