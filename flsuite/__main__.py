"""``python -m flsuite``."""

from flsuite.commands.main import console

if __name__ == "__main__":
    console()
