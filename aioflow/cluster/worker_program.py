"""The program of a worker process, deaf to the terminal before anything else is loaded: Ctrl-C
is for the program that started it.
"""

import signal
import sys

__all__: list[str] = []


def _ignore(number: int, frame: object) -> None:
    """A signal of the terminal, or of a service manager, that the program has got too."""


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        # Not SIG_IGN, which processes started by user code would inherit.
        signal.signal(number, _ignore)
    from aioflow.cluster.worker import main

    sys.exit(main(sys.argv[1:]))
