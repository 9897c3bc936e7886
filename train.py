"""Train from a checkout: `python train.py configs/quickstart.yaml [key.path=value ...]`."""

import sys

from ringjax.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
