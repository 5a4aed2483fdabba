"""``python -m lightning_hybrid.worker``: a server, which its driver starts and gives orders."""

import sys

from lightning_hybrid.worker.server import Server

if __name__ == "__main__":
    sys.exit(Server().run())
