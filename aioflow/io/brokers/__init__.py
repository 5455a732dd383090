"""Sources and sinks of message brokers."""
