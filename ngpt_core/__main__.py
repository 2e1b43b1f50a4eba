"""``python -m ngpt_core`` and ``torchrun ... -m ngpt_core``: the same commands as ``ngpt``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
