"""Train from a checkout: `python train.py configs/quickstart.yaml [key.path=value ...]`."""

import sys

if __name__ == "__main__":
    try:
        from ringjax.cli import main  # takes a second, in which Ctrl-C may come

        sys.exit(main(["train", *sys.argv[1:]]))
    except KeyboardInterrupt:
        sys.exit(130)
