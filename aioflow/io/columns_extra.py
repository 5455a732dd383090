"""Checks that the libraries which connectors of columns need are installed."""

from __future__ import annotations

from importlib.util import find_spec

from aioflow.core.errors import GraphError

__all__ = ["require_columns"]


def require_columns(what: str) -> None:
    """Raises GraphError naming `what` unless numpy and pyarrow are installed. Imports neither."""
    missing = [name for name in ("numpy", "pyarrow") if find_spec(name) is None]
    if missing:
        raise GraphError(f"{what} needs {' and '.join(missing)}: install aioflow[columns]")
