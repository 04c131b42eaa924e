"""Which announces go out on which interface.  Protocol 02, section 4.3."""

from __future__ import annotations

from enum import Enum

from rnsfast.engine.port import Mode, Port


class Passage(Enum):
    BLOCKED = 0
    FREE = 1
    CAPPED = 2  # subject to the interface's announce bandwidth


def passage(out: Port, source: Port | None, hops: int, *, local: bool) -> Passage:
    """Whether an announce goes out on `out`.

    Args:
        source: the interface of the current path to the destination; None without one.
        local: the destination is our own.
    """
    if not local:
        if source is None:
            return Passage.BLOCKED
        if not out.policy.announces_from_internal and source.mode is Mode.INTERNAL:
            return Passage.BLOCKED
    mode = out.mode
    if mode is Mode.ACCESS_POINT:
        return Passage.BLOCKED
    if mode is Mode.INTERNAL and not local:
        assert source is not None
        allowed = source.policy.announces_to_internal or source.mode is not Mode.BOUNDARY
        return Passage.FREE if allowed else Passage.BLOCKED
    if mode is Mode.ROAMING:
        blocked = not local and source is not None and source.mode in (Mode.ROAMING, Mode.BOUNDARY)
        return Passage.BLOCKED if blocked else Passage.FREE
    if mode is Mode.BOUNDARY:
        blocked = not local and source is not None and source.mode is Mode.ROAMING
        return Passage.BLOCKED if blocked else Passage.FREE
    return Passage.FREE if hops == 0 else Passage.CAPPED
