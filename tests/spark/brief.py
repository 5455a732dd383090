"""How Java is started where it lives for a minute."""

from __future__ import annotations

__all__ = ["BRIEF"]

BRIEF = (
    "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:+UnlockDiagnosticVMOptions "
    "-XX:-BytecodeVerificationRemote"
)
"""What it spends on compiling code twice, and on proving that of Spark's jars sound, it never
gets back.
"""
