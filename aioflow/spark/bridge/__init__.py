"""The session of Spark in a service, and its channels to the tasks of Spark."""
