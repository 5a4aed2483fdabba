import sys

from lightning_hybrid.cli import main

if __name__ == "__main__":
    sys.exit(main())
