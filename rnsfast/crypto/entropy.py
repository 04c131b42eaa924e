"""Where random bytes come from: a function from a size to that many bytes, so that tests can repeat themselves."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

Entropy = Callable[[int], bytes]

system_entropy: Final[Entropy] = os.urandom
