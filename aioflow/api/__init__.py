"""The user API: flows, streams, and the handle of a running job. `aioflow` exports it."""
