"""One thread per process, as in a worker: sums come out the same everywhere, and tests leave each other room."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
