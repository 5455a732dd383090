"""How Java is started where it lives for a minute."""

from __future__ import annotations

__all__ = ["BRIEF"]

BRIEF = (
    "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:+UnlockDiagnosticVMOptions "
    "-XX:-BytecodeVerificationRemote"
)
"""Settings of a short Java process, which does not regain the time for compiling code twice and for
verifying Spark's jars.
"""
