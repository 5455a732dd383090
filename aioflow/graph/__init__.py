"""The graphs of a flow: StreamGraph -> JobGraph -> TaskDeploymentDescriptor.

The API builds a StreamGraph of operators. Chaining the operators results in the JobGraph, from
which the JobMaster makes a TaskDeploymentDescriptor for each subtask.
"""
