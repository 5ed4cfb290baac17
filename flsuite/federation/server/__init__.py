"""The federation: its state, its evaluation, and the clients' memories."""
