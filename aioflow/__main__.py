"""`python -m aioflow` is `aioflow`.

Ctrl-C while it is still being loaded ends it as quietly as later.
"""

import sys

__all__ = ["main"]

INTERRUPTED = 130


def main() -> int:
    """The exit code: see `aioflow.cli`."""
    try:
        from aioflow.cli.command import main as carry_out

        return carry_out()
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
