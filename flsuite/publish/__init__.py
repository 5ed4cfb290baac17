"""How finished runs are shown to others: a page of HTML, and charts in Weights & Biases."""
