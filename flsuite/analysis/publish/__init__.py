"""Publishing finished runs: an HTML page, and charts in Weights & Biases."""
