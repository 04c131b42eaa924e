"""Streams between our node and a stock peer: sizes, both directions, both roles, compressible and not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from interop.harness import workspace
from interop.ours import ROLES, WAYS, Duo, Role, Task, drain, duo, join, pour
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
    # Every try costs the stock writer a compression of each chunk.
    back(pair, "responder", kind, MEGABYTE if tries == 1 else MEGABYTE // 3, tries)


@pytest.mark.parametrize("role", ROLES)
def test_a_stock_buffered_writer_is_read_whole(pair: Duo, role: Role) -> None:
    """The standard library's buffered layer, which an application of the reference puts over its writer."""
    back(pair, role, "random", 300_000, how="buffered")


# ------------------------------------------------------------ large
def is_datagrams(pair: Duo) -> bool:
    return any(interface.kind == "UDPInterface" for interface in pair.node.interfaces)


def large(pair: Duo) -> int:
    """Megabytes. A stock peer takes about one a second in packets of 500 bytes, which is what UDP has."""
    return 4 if is_datagrams(pair) else 20


@pytest.mark.slow
@pytest.mark.parametrize("role", ROLES)
def test_many_megabytes_to_the_peer(pair: Duo, role: Role) -> None:
    there(pair, role, data("random", "large", large(pair) * MEGABYTE))


@pytest.mark.slow
@pytest.mark.parametrize("role", ROLES)
def test_many_megabytes_from_the_peer(pair: Duo, role: Role) -> None:
    back(pair, role, "random", large(pair) * MEGABYTE)


@pytest.mark.slow
@pytest.mark.parametrize("role", ROLES)
def test_a_link_of_500_to_the_peer(narrow: tuple[Duo, str], role: Role) -> None:
    for size in SMALL:
        there(narrow[0], role, data("random", "small", size))
    there(narrow[0], role, data("random", "narrow", MEGABYTE), timeout=28)


@pytest.mark.slow
@pytest.mark.parametrize("role", ROLES)
def test_a_link_of_500_from_the_peer(narrow: tuple[Duo, str], role: Role) -> None:
    for size in SMALL:
        back(narrow[0], role, "random", size)
    back(narrow[0], role, "random", MEGABYTE, timeout=28)


# ------------------------------------------------------------ ends
@pytest.mark.parametrize("role", ROLES)
def test_one_direction_ends_and_the_other_goes_on(pair: Duo, role: Role) -> None:
    readers = []
    joint = join(pair, role, stock={"readers": [1]}, ours=lambda link: readers.append(link.open_reader(2)))
    with joint.link as link:
        pour(link.open_writer(1), b"that is all")
        assert joint.stock("received", stream=1)["eof"]
        joint.stock("write", stream=2, data=b"first ".hex(), end=False)
        readers[0].timeout = 20
        assert readers[0].read(6) == b"first "
        joint.stock("write", stream=2, data=b"second".hex(), end=True)
        assert readers[0].readall() == b"second"


@pytest.mark.parametrize("role", ROLES)
def test_the_peer_ends_first_and_we_go_on(pair: Duo, role: Role) -> None:
    readers = []
    joint = join(pair, role, stock={"readers": [1]}, ours=lambda link: readers.append(link.open_reader(2)))
    with joint.link as link:
        joint.stock("write", stream=2, data=b"that is all".hex())
        assert drain(readers[0]) == (11, digest(b"that is all"))
        content = data("random", "after", 200_000)
        pour(link.open_writer(1), content)
        assert joint.stock("received", stream=1)["sha256"] == digest(content)


@pytest.mark.parametrize("role", ROLES)
def test_several_streams_share_a_link(pair: Duo, role: Role) -> None:
    ids, readers = [0, 5, 16383], []
    joint = join(
        pair,
        role,
        stock={"echoes": [[i, i] for i in ids]},
        ours=lambda link: readers.extend(link.open_reader(i) for i in ids),
    )
    with joint.link as link:
        contents = [data("random", f"stream {i}", 150_000) for i in ids]
        taking = [Task(drain, reader) for reader in readers]
        giving = [Task(pour, link.open_writer(i), content) for i, content in zip(ids, contents, strict=True)]
        for task in giving:
            task.result()
        for task, content in zip(taking, contents, strict=True):
            assert task.result() == (150_000, digest(content))


@pytest.mark.parametrize("role", ROLES)
def test_a_peer_that_closes_cuts_the_streams_off(pair: Duo, role: Role) -> None:
    readers = []
    joint = join(pair, role, stock={"readers": [1]}, ours=lambda link: readers.append(link.open_reader(2)))
    writer = joint.link.open_writer(1)
    joint.stock("write", stream=2, data=b"half of".hex(), end=False)
    readers[0].timeout = 20
    assert readers[0].read(7) == b"half of"
    joint.stock("teardown")
    with pytest.raises(StreamBroken):
        readers[0].read(1)
    with pytest.raises(LinkClosed):
        writer.write(b"more")
    assert joint.link.wait_closed(10)


@pytest.mark.parametrize("role", ROLES)
def test_a_writer_of_ours_that_gives_up_leaves_the_peer_without_an_end(pair: Duo, role: Role) -> None:
    joint = join(pair, role, stock={"readers": [1]})
    writer = joint.link.open_writer(1)
    writer.write(b"x" * 1000)
    assert writer.wait_delivered(20)
    writer.abort()
    joint.stock("received", stream=1, size=1000)
    joint.link.close()
    assert joint.expect("cut")["size"] == 1000


# ------------------------------------------------------------ side by side
@pytest.mark.slow
@pytest.mark.parametrize("role", ROLES)
def test_many_links_at_once(pair: Duo, role: Role) -> None:
    """Ten, but over datagrams five: their windows together are more than the socket of a busy stock peer holds, and
    it gives up a link that it hears nothing of for long.
    """
    size, readers, count = 300_000, [], 5 if is_datagrams(pair) else 10
    joints = [
        join(pair, role, stock={"echoes": [[1, 2]]}, ours=lambda link: readers.append(link.open_reader(2)))
        for _ in range(count)
    ]
    contents = [data("random", f"link {number}", size) for number in range(count)]
    taking = [Task(drain, reader) for reader in readers]
    giving = [Task(pour, joint.link.open_writer(1), content) for joint, content in zip(joints, contents, strict=True)]
    for task in giving:
        task.result()
    for task, content in zip(taking, contents, strict=True):
        assert task.result() == (size, digest(content))
    for joint in joints:
        joint.link.close()
        joint.expect("closed")
