"""``python -m fibottention.cli``, for launchers such as torchrun."""

import sys

from fibottention.cli import main

sys.exit(main())
