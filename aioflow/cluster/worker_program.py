"""The program of a worker process. It first ignores the signals of the terminal.

Ctrl-C is for the program that started it.
"""

import signal
import sys

__all__: list[str] = []


def _ignore(number: int, frame: object) -> None:
    """Ignores a signal of the terminal or a service manager: the program gets it too."""


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        # Not SIG_IGN, which processes started by user code would inherit.
        signal.signal(number, _ignore)
    from aioflow.cluster.worker import main

    sys.exit(main(sys.argv[1:]))
