"""The user API: flows, streams, and the handle of a running job. The package `aioflow` exports this
API."""
