"""The experiments of single papers, around runs or without any: nothing else imports them."""
