"""Sources and sinks over HTTP."""
