"""What users write: flows and streams, and the handle of a running job. `aioflow` re-exports it."""
