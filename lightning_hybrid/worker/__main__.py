"""``python -m lightning_hybrid.worker RANK``: a server. Rank 0 starts it and gives it orders."""

import sys

from lightning_hybrid.worker.server import main

if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
