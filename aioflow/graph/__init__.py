"""The graphs of a flow: StreamGraph -> JobGraph -> TaskDeploymentDescriptor."""
