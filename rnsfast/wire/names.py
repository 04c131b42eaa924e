"""Names and addresses of destinations.  Protocol 01, section 3.1.

name hash        = SHA-256("app.aspect1.aspect2")[:10]
destination hash = SHA-256(name hash | identity hash)[:16]     SINGLE, GROUP
destination hash = SHA-256(name hash)[:16]                     PLAIN
"""

from __future__ import annotations

from rnsfast.crypto.hashes import short, truncated


def full_name(app: str, *aspects: str) -> str:
    """The dotted name. Parts may be empty or hold any character but a dot; ValueError if one has a dot."""
    for part in (app, *aspects):
        if "." in part:
            raise ValueError(f"{part!r} has a dot in it: dots separate the parts of a name, give them one by one")
    return ".".join((app, *aspects))


def name_hash(app: str, *aspects: str) -> bytes:
    """The 10-byte hash of a name. ValueError if a part has a dot."""
    return short(full_name(app, *aspects).encode())


def destination_hash(name: bytes, identity_hash: bytes | None) -> bytes:
    """The 16-byte address for a 10-byte name hash and a 16-byte identity hash, None for PLAIN destinations."""
    if len(name) != 10:
        raise ValueError(f"a name hash has 10 bytes, not {len(name)}")
    if identity_hash is None:
        return truncated(name)
    if len(identity_hash) != 16:
        raise ValueError(f"an identity hash has 16 bytes, not {len(identity_hash)}")
    return truncated(name + identity_hash)


def split_name(full: str) -> tuple[str, tuple[str, ...]]:
    """The app name and the aspects of a dotted name."""
    app, *aspects = full.split(".")
    return app, tuple(aspects)
