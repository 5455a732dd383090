"""`python -m aioflow` is `aioflow`."""

import sys

from aioflow.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
