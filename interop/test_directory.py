"""One directory, two implementations: a stock transport node's tables taken over by ours and given back."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from interop.harness import StockPeer, free_port, tcp_client, tcp_server, workspace
from interop.ours import LIMIT
from rnsfast import Node

NAME = "interop.kept"


@pytest.mark.slow
@pytest.mark.parametrize("first", ["ours", "stock"])
def test_the_other_implementation_takes_the_directory_over(first: str) -> None:
    """The relay connects to both ends, so its interfaces are the same after the change. The destination is silent."""
    near, far = free_port(), free_port()
    with workspace() as space, ExitStack() as stack:
        target = stack.enter_context(StockPeer(space.config("target", [tcp_server(far)])))
        seeker = stack.enter_context(StockPeer(space.config("seeker", [tcp_server(near)])))
        sections = [tcp_client(near, "near"), tcp_client(far, "far")]
        config = space.config("relay", sections, transport=True)
        made = target.request("destination", name=NAME, app_data="0102", proof="all")
        dest = bytes.fromhex(made["dest"])

        def ours() -> bytes:
            """Run our node in the directory; what it knows of the destination at the end."""
            with Node(config, strict=True) as node:
                if not node.has_path(dest):
                    node.request_path(dest, LIMIT)
                assert node.hops_to(dest) == 1 and node.app_data(dest) == b"\x01\x02"
                check(known=True)
                return node._engine.transport_id

        def stock() -> bytes:
            with StockPeer(config) as peer:
                if not peer.request("has_path", dest=dest.hex())["has"]:
                    peer.request("request_path", dest=dest.hex())
                    assert peer.request("wait_path", dest=dest.hex())["found"]
                assert peer.request("hops", dest=dest.hex())["hops"] == 1
                check(known=True)
            return (config / "storage" / "transport_identity").read_bytes()

        def check(*, known: bool) -> None:
            """Who is at the other side of the relay gets an answer from its tables."""
            assert seeker.request("wait_path", dest=dest.hex(), timeout=LIMIT)["found"] is known

        runs = [ours, stock, ours] if first == "ours" else [stock, ours, stock]
        runs[0]()
        tables = config / "storage"
        before = (tables / "transport_identity").read_bytes()
        assert (tables / "destination_table").stat().st_size > 60 and list((tables / "cache" / "announces").iterdir())
        target.kill()  # from here on only the tables know about it
        for run in runs[1:]:
            with ExitStack() as inner:
                if run is ours:
                    node = inner.enter_context(Node(config, strict=True))
                    with node._reactor.lock:
                        path = node._engine.paths.paths.get(dest)
                    assert path is not None and path.hops == 1 and path.announce
                    assert node.app_data(dest) == b"\x01\x02"
                else:
                    peer = inner.enter_context(StockPeer(config))
                    assert peer.request("has_path", dest=dest.hex())["has"]
                    assert peer.request("known", dest=dest.hex())["app_data"] == "0102"
            assert (tables / "transport_identity").read_bytes() == before
