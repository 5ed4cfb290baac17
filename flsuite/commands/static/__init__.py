"""What a request can be told from source code alone, before torch and Lightning are imported."""
