"""The graphs of a flow: StreamGraph -> JobGraph -> TaskDeploymentDescriptor.

The API builds a StreamGraph of operators. Chaining its operators gives the JobGraph. The JobMaster
makes a TaskDeploymentDescriptor from it for each subtask.
"""
