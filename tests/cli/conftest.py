"""What a command sets up for its process must not stay for the next test."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from rnsfast.node.logs import ROOT


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    logger = logging.getLogger(ROOT)
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)
