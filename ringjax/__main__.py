"""`python -m ringjax` is the command `ringjax`."""

import sys

from ringjax.cli import main

if __name__ == "__main__":
    sys.exit(main())
