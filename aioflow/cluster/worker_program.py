"""The program of a worker process. It ignores the signals of the terminal before it imports the
engine.

Ctrl-C is handled by the program that started the worker.
"""

import signal
import sys

__all__: list[str] = []


def _ignore(number: int, frame: object) -> None:
    """Ignores a signal of the terminal or a service manager, because the program that started the
    worker gets the signal too."""


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        # Not SIG_IGN, which processes started by user code would inherit.
        signal.signal(number, _ignore)
    from aioflow.cluster.worker import main

    sys.exit(main(sys.argv[1:]))
