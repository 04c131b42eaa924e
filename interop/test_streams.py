"""Streams between our node and a stock peer: sizes, both directions, both roles, compressible and not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from interop.harness import workspace
from interop.ours import ROLES, WAYS, Duo, Role, drain, duo, join, pour
from interop.seeded import data, digest
from rnsfast import LinkClosed, StreamBroken

MEGABYTE = 1 << 20
SMALL = [0, 1, 423, 424, 16384, 16385]


@pytest.fixture(scope="module", params=WAYS, ids="-".join)
def pair(request: pytest.FixtureRequest) -> Iterator[Duo]:
    kind, ours = request.param
    with workspace() as space, duo(space, kind, ours) as made:
        yield made


@pytest.fixture(scope="module", params=["ours", "stock", "both"])
def narrow(request: pytest.FixtureRequest) -> Iterator[tuple[Duo, str]]:
    """Nodes one or both of which offer no more than 500 bytes."""
    off = {"link_mtu_discovery": False}
    ours, stock = (off if request.param in (side, "both") else {} for side in ("ours", "stock"))
    with workspace() as space, duo(space, our_node=ours, stock_node=stock) as made:
        yield made, request.param


def there(pair: Duo, role: Role, content: bytes, compression: str = "never", timeout: float = 25.0) -> None:
    """From us to the stock peer."""
    joint = join(pair, role, stock={"readers": [1]})
    with joint.link:
        pour(joint.link.open_writer(1, compression=compression), content, timeout)  # type: ignore[arg-type]
        got = joint.stock("received", stream=1, timeout=timeout)
        assert got["eof"] and (got["size"], got["sha256"]) == (len(content), digest(content))


def back(pair: Duo, role: Role, kind: str, size: int, tries: int = 1, how: str = "kind", timeout: float = 25.0) -> None:
    """From the stock peer to us."""
    readers = []
    joint = join(pair, role, ours=lambda link: readers.append(link.open_reader(1)))
    with joint.link:
        answer = joint.stock_begin("write", stream=1, kind=kind, size=size, tries=tries, how=how, timeout=timeout)
        assert drain(readers[0], timeout) == (size, digest(data(kind, "s", size)))
        answer()


@pytest.mark.parametrize("role", ROLES)
def test_small_sizes_to_the_peer(pair: Duo, role: Role) -> None:
    for size in SMALL:
        there(pair, role, data("random", "small", size))


@pytest.mark.parametrize("role", ROLES)
def test_small_sizes_from_the_peer(pair: Duo, role: Role) -> None:
    for size in SMALL:
        back(pair, role, "random", size)


@pytest.mark.parametrize("compression", ["auto", "never", "always"])
@pytest.mark.parametrize("kind", ["random", "text"])
def test_a_megabyte_under_every_compression(pair: Duo, kind: str, compression: str) -> None:
    there(pair, "initiator", data(kind, "megabyte", MEGABYTE), compression)


@pytest.mark.parametrize(("kind", "tries"), [("random", 1), ("random", 4), ("text", 1), ("text", 4)])
def test_a_megabyte_from_the_peer(pair: Duo, kind: str, tries: int) -> None:
    back(pair, "responder", kind, MEGABYTE, tries)
