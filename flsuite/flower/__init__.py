"""flsuite under Flower: the nodes are an engine, models are clients, rules are strategies.

Flower (``flwr``) is an extra: ``pip install "flsuite[flower]"``. A Flower app names
:mod:`flsuite.flower.app`. From Python, :func:`flsuite.flower.server.serve` and
:class:`flsuite.flower.client.Site` take objects instead of a config.
"""

from flsuite.common.errors import require_extra

require_extra("flsuite.flower", ("flwr",), "flower")
