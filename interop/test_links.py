"""Links between our node and a stock peer: MTU, identity, packets and proofs, closing, restarts."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from time import monotonic
from typing import Any

import pytest

from interop.harness import InteropError, workspace
from interop.ours import LIMIT, OUR_NAME, ROLES, STOCK_NAME, WAYS, Duo, Role, Side, Task, drain, duo, join, pour
from interop.proxy import is_link_proof, is_link_request, is_link_rtt
from interop.seeded import data, digest, random_bytes
from rnsfast import Identity, Link, LinkClosed, LinkTimeout, MessageTooLarge, Reason, State, StreamBroken

DISCOVERED = {"tcp": 16384, "backbone": 32768, "udp": 500}
OFF = {"link_mtu_discovery": False}


@pytest.fixture(scope="module", params=WAYS, ids="-".join)
def pair(request: pytest.FixtureRequest) -> Iterator[Duo]:
    kind, ours = request.param
    with workspace() as space, duo(space, kind, ours) as made:
        yield made


# ------------------------------------------------------------ what it is
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(("kind", "ours"), WAYS)
@pytest.mark.parametrize("off", ["nobody", "ours", "stock", "both"])
def test_both_ends_agree_on_the_mtu(kind: str, ours: Side, role: Role, off: str) -> None:
    """Only the initiator's setting counts: it asks or does not ask."""
    mine, theirs = (OFF if off in (side, "both") else {} for side in ("ours", "stock"))
    asks = off == "nobody" or off == ("stock" if role == "initiator" else "ours")
    with workspace() as space, duo(space, kind, ours, our_node=mine, stock_node=theirs) as pair:
        joint = join(pair, role)
        expected = DISCOVERED[kind] if asks else 500
        assert joint.link.mtu == joint.stock("link_info")["mtu"] == expected
        assert joint.link.mdu == joint.stock("link_info")["mdu"]
        assert joint.link.is_initiator is (role == "initiator") is not joint.stock_info["initiator"]
        content = random_bytes("packet", joint.link.mdu)
        joint.link.send(content)
        assert joint.expect("link_packet")["data"] == content.hex()
        with pytest.raises(MessageTooLarge):
            joint.link.send(content + b"x")


@pytest.mark.parametrize("size", [2000, 16384, 100_000])
def test_a_fixed_mtu_of_ours_holds(size: int) -> None:
    with workspace() as space, duo(space, ours="connector", our_section={"fixed_mtu": size}) as pair:
        for role in ROLES:
            joint = join(pair, role, stock={"readers": [1]})
            assert joint.link.mtu == joint.stock("link_info")["mtu"] == min(size, 16384)
            pour(joint.link.open_writer(1), random_bytes("fixed", 100_000))
            assert joint.stock("received", stream=1)["size"] == 100_000


# ------------------------------------------------------------ identity
def test_we_identify_ourselves(pair: Duo) -> None:
    joint, who = join(pair, "initiator"), Identity()
    with joint.link:
        joint.link.identify(who)
        assert joint.expect("identified")["identity"] == who.hash.hex()


def test_the_peer_identifies_itself(pair: Duo) -> None:
    told: queue.SimpleQueue[Identity] = queue.SimpleQueue()
    joint = join(pair, "responder", ours=lambda link: link.on_identified(told.put))
    with joint.link:
        assert joint.link.remote_identity is None
        who = pair.peer.request("identity")
        joint.stock("identify", identity=who["identity"])
        assert told.get(timeout=LIMIT).hash.hex() == who["identity"]
        seen = joint.link.wait_identified(LIMIT)
        assert seen is not None and seen.public_key.hex() == who["public"]


def test_connect_can_identify_at_once(pair: Duo) -> None:
    who, dest = Identity(), pair.stock_destination()
    with pair.node.connect(dest, *STOCK_NAME.split("."), identity=who) as link:
        assert pair.peer.expect("identified", link=link.id.hex())["identity"] == who.hash.hex()
        assert link.remote_identity is not None


# ------------------------------------------------------------ packets on links
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    ("strategy", "answer", "proved"),
    [("all", True, True), ("none", True, False), ("app", True, True), ("app", False, False)],
)
def test_link_packets_are_proved_by_strategy(pair: Duo, role: Role, strategy: str, answer: bool, proved: bool) -> None:
    """Towards the peer in both roles; what we prove is our destination's strategy, so as responder."""
    arrived: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    inbox = pair.our_destination()
    inbox.set_proofs(strategy, lambda data: answer)
    if role == "initiator":
        joint = join(pair, role, proof=strategy, prove=answer, ours=lambda link: link.on_packet(arrived.put))
        link, peer_end = joint.link, joint.id
    else:
        links: queue.SimpleQueue[Link] = queue.SimpleQueue()

        def established(link: Link) -> None:
            link.on_packet(arrived.put)
            links.put(link)

        inbox.on_link(established)
        told = pair.peer.request("open", dest=inbox.hash.hex(), name=".".join(OUR_NAME), proof=strategy, prove=answer)
        link, peer_end = links.get(timeout=LIMIT), told["link"]
    with link:
        receipt = link.send(b"from us")
        assert pair.peer.expect("link_packet", link=peer_end)["data"] == b"from us".hex()
        assert receipt.wait(LIMIT if proved else 0) is proved
        if role == "responder":
            if proved:
                sent = pair.peer.request_proof("link_send", link=peer_end, data="0102")
            else:
                sent = pair.peer.request("link_send", link=peer_end, data="0102", wait=True, timeout=1)
            assert sent["status"] == ("delivered" if proved else "failed")
        else:
            pair.peer.request("link_send", link=peer_end, data="0102")
        assert arrived.get(timeout=LIMIT) == b"\x01\x02"
    inbox.close()


# ------------------------------------------------------------ closing
@pytest.mark.parametrize("role", ROLES)
def test_we_close(pair: Duo, role: Role) -> None:
    joint = join(pair, role)
    joint.link.close()
    assert joint.expect("closed")["reason"] == ("initiator" if role == "initiator" else "destination")
    assert joint.link.state is State.CLOSED


@pytest.mark.parametrize("role", ROLES)
def test_the_peer_closes(pair: Duo, role: Role) -> None:
    told: queue.SimpleQueue[Link] = queue.SimpleQueue()
    joint = join(pair, role, ours=lambda link: link.on_close(told.put))
    joint.stock("teardown")
    assert told.get(timeout=LIMIT) is joint.link
    assert joint.link.reason is (Reason.DESTINATION_CLOSED if role == "initiator" else Reason.INITIATOR_CLOSED)
    with pytest.raises(LinkClosed):
        joint.link.send(b"too late")


def test_links_that_are_not_wanted_are_not_answered(pair: Duo) -> None:
    dest = pair.stock_destination(accepts_links=False)
    with pytest.raises(LinkTimeout):
        pair.node.connect(dest, *STOCK_NAME.split("."), timeout=1.5)
    inbox = pair.our_destination()
    inbox.accepts_links = False
    with pytest.raises(InteropError, match="no link within"):
        pair.peer.request("open", dest=inbox.hash.hex(), name=".".join(OUR_NAME), timeout=1)


# ------------------------------------------------------------ a handshake with losses
@pytest.mark.parametrize("role", ROLES)
def test_a_lost_rtt_packet_does_not_keep_the_link_from_working(role: Role) -> None:
    """A stock responder then never calls its application (03 section 7), ours comes up with the first packet."""
    with workspace() as space, duo(space, proxied=True) as pair:
        lane = pair.from_us if role == "initiator" else pair.from_stock
        arrived: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        if role == "responder":
            inbox = pair.our_destination()
            inbox.on_link(lambda link: link.on_packet(arrived.put))
            lane.drop_nth(is_link_rtt, 1)
            link = pair.peer.request("open", dest=inbox.hash.hex(), name=".".join(OUR_NAME))["link"]
            pair.peer.request("link_send", link=link, data="0102")
            assert arrived.get(timeout=LIMIT) == b"\x01\x02"
        else:
            dest = pair.stock_destination()
            lane.drop_nth(is_link_rtt, 1)
            with pair.node.connect(dest, *STOCK_NAME.split("."), timeout=5) as link:
                assert link.is_active


@pytest.mark.parametrize("match", [is_link_request, is_link_proof], ids=["request", "proof"])
def test_connect_fails_in_time_and_succeeds_the_next_time(match: Any) -> None:
    with workspace() as space, duo(space, proxied=True) as pair:
        dest = pair.stock_destination()
        (pair.from_us if match is is_link_request else pair.from_stock).drop_nth(match, 1)
        with pytest.raises(LinkTimeout):
            pair.node.connect(dest, *STOCK_NAME.split("."), timeout=1.5)
        with pair.node.connect(dest, *STOCK_NAME.split("."), timeout=LIMIT) as link:
            assert link.is_active


# ------------------------------------------------------------ the peer's process ends
@pytest.mark.slow
@pytest.mark.parametrize("ours", ["listener", "connector"])
@pytest.mark.parametrize("kind", ["tcp", "backbone"])
def test_the_peer_is_killed_in_the_middle_and_comes_back(kind: str, ours: Side) -> None:
    with workspace() as space, duo(space, kind, ours) as pair:
        made = pair.peer.request("identity")
        dest = pair.stock_destination(identity=made["identity"], on_link={"readers": [1]})
        joint = join(pair, "initiator", dest=dest)
        readers = []
        other = join(pair, "responder", ours=lambda link: readers.append(link.open_reader(2)))
        writer, taking = joint.link.open_writer(1), Task(drain, readers[0])

        def endless() -> None:
            while True:
                writer.write(random_bytes("endless", 100_000))

        giving = Task(endless)
        pair.peer.begin("write", link=other.id, stream=2, size=200_000_000, timeout=60)
        joint.stock("received", stream=1, size=500_000)
        killed = monotonic()
        pair.peer.kill()
        with pytest.raises(LinkClosed):
            giving.result(15)
        with pytest.raises(StreamBroken):
            taking.result(15)
        assert monotonic() - killed < 12
        assert joint.link.state is State.CLOSED and other.link.wait_closed(1)

        pair.peer.start()
        pair.peer.request("identity", private=made["private"])
        again = pair.peer.request(
            "destination", name=STOCK_NAME, identity=made["identity"], on_link={"readers": [1]}, announce=True
        )
        assert again["dest"] == dest.hex()
        with pair.node.connect(dest, *STOCK_NAME.split("."), timeout=LIMIT) as link:
            pour(link.open_writer(1), data("random", "again", 100_000))
            got = pair.peer.request("received", link=link.id.hex(), stream=1)
            assert got["sha256"] == digest(data("random", "again", 100_000))


@pytest.mark.slow
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("ours", ["listener", "connector"])
def test_a_connection_that_breaks_ends_its_links_and_comes_back(ours: Side, role: Role) -> None:
    with workspace() as space, duo(space, ours=ours, proxied=True) as pair:
        assert pair.proxy is not None
        readers: list[Any] = []
        joint = join(pair, role, stock={"readers": [1]}, ours=lambda link: readers.append(link.open_reader(2)))
        began, waiting = monotonic(), Task(readers[0].read, 1)
        pair.proxy.cut()
        if ours == "listener":  # a connection that was accepted is gone for good, and its links with it
            with pytest.raises(StreamBroken):
                waiting.result(15)
            assert monotonic() - began < 12 and joint.link.state is State.CLOSED
        pair.meet()
        fresh = join(pair, role, stock={"readers": [1]})
        with fresh.link:
            pour(fresh.link.open_writer(1), b"again")
            assert fresh.stock("received", stream=1)["sha256"] == digest(b"again")
        joint.link.close()
