"""Published datasets and tables, one class a file."""
