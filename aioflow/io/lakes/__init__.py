"""Sources and sinks of the tables of a lake."""
