"""`python -m router.sim` is `kvgate sim`."""

import sys

from router.sim.cli import main

sys.exit(main())
