"""Every scenario needs the stock package: without it the suite fails with one sentence instead of skipping."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from interop.harness import StockMissing, Workspace, stock_python, workspace


@pytest.fixture(scope="session", autouse=True)
def stock() -> str:
    """The interpreter that has the stock package."""
    try:
        return stock_python()
    except StockMissing as missing:
        pytest.fail(str(missing), pytrace=False)


@pytest.fixture
def space() -> Iterator[Workspace]:
    with workspace() as made:
        yield made
