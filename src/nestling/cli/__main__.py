"""`python -m nestling.cli`, as torchrun needs it."""

import sys

from nestling.cli import main

sys.exit(main())
