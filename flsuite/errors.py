"""What can go wrong by a user's hand, and what ends a run."""

__all__ = ["FederationError", "FlsuiteError"]


class FlsuiteError(Exception):
    """A request that cannot be carried out as it stands; the message says what to change.

    The command prints it as one line and exits with status 2, so a message is a single sentence that names the argument,
    and, where there is one, the client and the round. Not a ValueError: parsers catch those to try another reading.
    """


class FederationError(RuntimeError):
    """A run that cannot go on; what it had reached before is kept."""
