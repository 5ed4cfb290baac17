"""Settings of the Flower tests, applied before Flower is imported."""

import os

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
