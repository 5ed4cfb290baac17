"""Who trains when, and how long it takes on the virtual clock."""
