"""One thread per process, as in a worker: sums come out the same everywhere, and the tests leave room for each other."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
