"""Updates on their way to the server: compressed, or masked so that only their sum is known."""
