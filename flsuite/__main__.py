"""``python -m flsuite``."""

from flsuite.cli import main

if __name__ == "__main__":
    main()
