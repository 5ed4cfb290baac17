"""Fixtures for tests of the readers."""

import urllib.error
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Refuse all network access, and return the addresses that were requested."""
    requested: list[str] = []

    def refuse(request: Any, *args: Any, **kwargs: Any) -> None:
        requested.append(getattr(request, "full_url", request))
        raise urllib.error.URLError("no network in tests")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    return requested
