"""Published datasets and tables, one class per file."""
