"""``python -m lightning_hybrid.worker RANK``: a server, which rank 0 starts and gives orders."""

import sys

from lightning_hybrid.worker.server import main

if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
