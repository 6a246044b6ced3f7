"""``python -m regrow`` is the ``regrow`` command."""

import sys

from regrow.cli import main

sys.exit(main())
