"""From the flow that a user wrote to what tasks are deployed from: StreamGraph -> JobGraph ->
TaskDeploymentDescriptor.
"""
