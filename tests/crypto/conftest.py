"""Every test that makes keys can run with every library that makes them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rnsfast.crypto.provider import ENVIRONMENT, PROVIDERS, provider


@pytest.fixture(params=list(PROVIDERS))
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Keys made during the test use this library."""
    monkeypatch.setenv(ENVIRONMENT, request.param)
    provider.cache_clear()
    assert provider().name == request.param
    yield request.param
    provider.cache_clear()
