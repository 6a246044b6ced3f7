"""``python -m regrow`` is the ``regrow`` command."""

import sys

from .cli import main

sys.exit(main())
