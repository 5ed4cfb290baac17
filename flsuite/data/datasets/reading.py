"""Help for reading files: error messages and chunk sizes."""

__all__ = ["one_line"]


def one_line(error: Exception) -> str:
    """Return an error's message on one line, or its class's name if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__
