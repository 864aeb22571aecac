"""`python -m sortattn`, the same as the command `sortattn`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
