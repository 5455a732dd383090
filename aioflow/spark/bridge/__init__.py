"""The Spark session of a service, and the channels between the service and Spark's tasks."""
