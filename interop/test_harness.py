"""The harness proves itself: stock node against stock node, before anything of ours takes one side."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from interop.harness import (
    CLIENTS,
    HERE,
    SERVERS,
    InteropError,
    Peer,
    Section,
    StockMissing,
    StockPeer,
    Workspace,
    access,
    free_port,
    started,
    stock_python,
    tcp_client,
    tcp_server,
    wait_connected,
)
from interop.proxy import FrameProxy, is_channel, is_link_data, is_link_proof, is_packet_proof, unescape
from interop.seeded import data, digest, message_bytes, random_bytes, series_digest, text_bytes

NAME = "interop.harness"
FILE_PEER = str(HERE / "file_peer.py")


@contextmanager
def pair(
    space: Workspace, kind: str = "tcp", proxy: FrameProxy | None = None, **options: object
) -> Iterator[tuple[StockPeer, StockPeer]]:
    """A listening and a connecting node; with a proxy, the connection goes through it."""
    port = proxy.target_port if proxy else free_port()
    mtu = options.pop("link_mtu_discovery", True)
    a = StockPeer(space.config("a", [SERVERS[kind](port, **options)]))
    with a, ExitStack() as stack:
        if proxy:
            stack.enter_context(proxy)
        near = proxy.port if proxy else port
        b = StockPeer(space.config("b", [CLIENTS[kind](near, **options)], link_mtu_discovery=mtu))
        stack.enter_context(b)
        yield a, b


def meet(a: Peer, b: Peer, **destination: object) -> str:
    """A destination on `a` that `b` has a path to."""
    dest: str = a.request("destination", name=NAME, **destination)["dest"]
    assert b.request("wait_path", dest=dest)["found"]
    return dest


def link_up(a: Peer, b: Peer, dest: str, **arguments: object) -> str:
    link: str = b.request("open", dest=dest, name=NAME, **arguments)["link"]
    a.expect("link", link=link)
    return link


# ------------------------------------------------------------ without nodes
def test_a_longer_request_for_seeded_bytes_begins_with_the_shorter_one() -> None:
    for kind in ("random", "text"):
        assert data(kind, 7, 5000)[:123] == data(kind, 7, 123)
        assert data(kind, 7, 300, 1000) == data(kind, 7, 5000)[1000:1300]
        assert data(kind, 7, 500) != data(kind, 8, 500)


def test_a_missing_stock_package_is_named_in_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\nexit 1\n")
    bare.chmod(0o755)
    monkeypatch.setenv("RNSFAST_STOCK_PYTHON", str(bare))
    stock_python.cache_clear()
    try:
        with pytest.raises(StockMissing, match=r"pip install rns==1\.5\.7"):
            stock_python()
    finally:
        stock_python.cache_clear()


def test_ports_are_given_once() -> None:
    ports = [free_port() for _ in range(50)]
    assert len(set(ports)) == 50


def test_frames_are_unescaped() -> None:
    assert unescape(bytes.fromhex("01 7d5e 02 7d5d 03")) == bytes.fromhex("01 7e 02 7d 03")


# ------------------------------------------------------------ life of a process
def test_a_peer_that_dies_is_reported_at_once_and_not_after_the_deadline(space: Workspace) -> None:
    with StockPeer(space.config("a", [tcp_server(free_port())])) as a:
        a.kill()
        with pytest.raises(InteropError, match="ended"):
            a.expect("never", timeout=60)


def test_an_error_in_a_command_is_its_reply(space: Workspace) -> None:
    with StockPeer(space.config("a", [tcp_server(free_port())])) as a:
        with pytest.raises(InteropError, match="no link 00"):
            a.request("teardown", link="00")
        assert a.request("stats")["threads"] > 0
        assert a.stop() == 0


# ------------------------------------------------------------ announces, paths, single packets
@pytest.mark.parametrize("kind", ["tcp", "backbone"])
@pytest.mark.parametrize("code", [{}, access("net", "secret")], ids=["open", "access code"])
def test_announce_path_and_packet(space: Workspace, kind: str, code: dict[str, object]) -> None:
    with pair(space, kind, **code) as (a, b):
        wait_connected(a, b)
        about = {"proof": "all", "ratchets": str(space.root / "ratchets"), "app_data": b"hello".hex()}
        dest = a.request("destination", name=NAME, announce=True, **about)["dest"]
        told = b.expect("announce", dest=dest, app_data=b"hello".hex(), path_response=False)
        assert told["ratchet"] and told["hops"] == 1
        assert b.request("send", name=NAME, dest=dest, data="0102")["status"] == "delivered"
        got = a.expect("packet", dest=dest)
        assert got["data"] == "0102" and got["ratchet"]


def test_proofs_follow_the_strategy(space: Workspace) -> None:
    with pair(space) as (a, b):
        for name, proof, prove, status in (
            ("interop.all", "all", True, "delivered"),
            ("interop.yes", "app", True, "delivered"),
            ("interop.no", "app", False, "failed"),
        ):
            dest = a.request("destination", name=name, proof=proof, prove=prove)["dest"]
            assert b.request("wait_path", dest=dest)["found"]
            assert b.request("send", name=name, dest=dest, data="aa", timeout=2)["status"] == status


def test_group_and_plain_packets(space: Workspace) -> None:
    key = random_bytes("group key", 64).hex()
    with pair(space) as (a, b):
        assert b.request("wait_path", dest=a.request("destination", name=NAME)["dest"])["found"]
        shared = a.request("identity")
        assert b.request("identity", private=shared["private"])["identity"] == shared["identity"]
        here = a.request("destination", name="interop.group", kind="group", identity=shared["identity"], key=key)[
            "dest"
        ]
        b.request("send", name="interop.group", kind="group", identity=shared["identity"], key=key, data="0a0b")
        assert a.expect("packet", dest=here)["data"] == "0a0b"
        here = a.request("destination", name="interop.plain", kind="plain")["dest"]
        b.request("send", name="interop.plain", kind="plain", data="0c")
        assert a.expect("packet", dest=here)["data"] == "0c"


def test_two_transport_nodes_in_a_row(space: Workspace) -> None:
    one, two, three = free_port(), free_port(), free_port()

    def relay(name: str, listen: int, *more: Section) -> StockPeer:
        return StockPeer(space.config(name, [tcp_server(listen), *more], transport=True))

    a = StockPeer(space.config("a", [tcp_server(one)]))
    first, second = relay("r1", two, tcp_client(one, "towards a")), relay("r2", three, tcp_client(two, "towards r1"))
    b = StockPeer(space.config("b", [tcp_client(three)]))
    with started(a, first, second, b):
        for near, far in ((a, first), (first, second), (second, b)):
            wait_connected(near, far)
        dest = a.request("destination", name=NAME, announce=True, on_link={"channel": {"echo": True}})["dest"]
        b.expect("announce", dest=dest)  # relays in full mode pass announces on, but not questions
        assert b.request("hops", dest=dest)["hops"] == 3
        link = link_up(a, b, dest, setup={"channel": {}})
        b.request("message", link=link, count=20, size=40)
        assert b.request("messages", link=link, count=20)["sha256"] == series_digest("m", 20, 40)


# ------------------------------------------------------------ links
@pytest.mark.parametrize(("kind", "mtu"), [("tcp", 16384), ("backbone", 32768)])
def test_link_packets_identity_and_close(space: Workspace, kind: str, mtu: int) -> None:
    with pair(space, kind) as (a, b):
        dest = meet(a, b, proof="all")
        link = link_up(a, b, dest, proof="all")
        assert b.request("link_info", link=link)["mtu"] == mtu
        assert b.request_proof("link_send", link=link, data="01")["status"] == "delivered"
        assert a.request_proof("link_send", link=link, data="02")["status"] == "delivered"
        assert a.expect("link_packet", link=link)["data"] == "01"
        assert b.expect("link_packet", link=link)["data"] == "02"
        who = b.request("identity")["identity"]
        b.request("identify", link=link, identity=who)
        assert a.expect("identified", link=link)["identity"] == who
        a.request("teardown", link=link)
        assert b.expect("closed", link=link)["reason"] == "destination"
        link = link_up(a, b, dest)
        b.request("teardown", link=link)
        assert a.expect("closed", link=link)["reason"] == "initiator"


def test_requests_and_resources(space: Workspace) -> None:
    with pair(space) as (a, b):
        dest = meet(a, b, handlers=["/same"], on_link={"resources": True})
        link = link_up(a, b, dest)
        assert b.request("request", link=link, path="/same", data="0102")["data"] == "0102"
        sent = b.request("resource", link=link, size=300_000)
        got = a.expect("resource", link=link)
        assert sent["complete"] and got["complete"] and got["sha256"] == sent["sha256"]


def test_without_discovery_a_link_has_500(space: Workspace) -> None:
    with pair(space, link_mtu_discovery=False) as (a, b):
        link = link_up(a, b, meet(a, b))
        assert b.request("link_info", link=link)["mtu"] == 500 and a.request("link_info", link=link)["mdu"] == 431


def test_burst_from_the_established_callback(space: Workspace) -> None:
    burst = {"count": 20, "size": 40, "via": "channel"}
    with pair(space) as (a, b):
        dest = meet(a, b, on_link={"sleep": 0.05, "channel": {}})
        link = link_up(a, b, dest, setup={"burst": burst})
        got = a.request("messages", link=link, count=20)
        assert got["in_order"]
        assert got["sha256"] == digest(
            b"".join(n.to_bytes(4, "big") + message_bytes("burst", n, 36) for n in range(20))
        )


# ------------------------------------------------------------ channels and buffers
def test_messages_are_echoed_in_order_past_a_handler_that_sleeps(space: Workspace) -> None:
    with pair(space) as (a, b):
        dest = meet(a, b, on_link={"channel": {"echo": True, "sleep": 0.5, "sleep_at": 5}})
        link = link_up(a, b, dest, setup={"channel": {}})
        b.request("message", link=link, count=200, size=300)
        back = b.request("messages", link=link, count=200)
        assert back["in_order"] and back["sha256"] == series_digest("m", 200, 300)


@pytest.mark.parametrize(("content", "tries"), [("random", 1), ("text", 4)])
@pytest.mark.parametrize("kind", ["tcp", "backbone"])
def test_one_megabyte_on_a_stream(space: Workspace, kind: str, content: str, tries: int) -> None:
    with pair(space, kind) as (a, b):
        link = link_up(a, b, meet(a, b, on_link={"readers": [3]}))
        sent = b.request("write", link=link, stream=3, kind=content, size=1 << 20, tries=tries, timeout=60)
        got = a.expect("eof", link=link, stream=3, timeout=60)
        assert (
            (got["size"], got["sha256"]) == (1 << 20, sent["sha256"]) == (1 << 20, digest(data(content, "s", 1 << 20)))
        )


def test_stream_there_and_back_and_half_close(space: Workspace) -> None:
    with pair(space) as (a, b):
        link = link_up(a, b, meet(a, b, on_link={"echoes": [[1, 2]]}), setup={"readers": [2]})
        b.request("write", link=link, stream=1, data=b"first ".hex(), end=False)
        assert b.request("received", link=link, stream=2, size=6)["size"] == 6
        b.request("write", link=link, stream=1, data=b"last".hex(), end=True)
        assert b.expect("eof", link=link, stream=2)["sha256"] == digest(b"first last")
        a.request("write", link=link, stream=2, data=b"after the end".hex(), end=False)  # the other half is still open


def test_a_stream_whose_link_ends_is_reported_cut(space: Workspace) -> None:
    with pair(space) as (a, b):
        link = link_up(a, b, meet(a, b, on_link={"readers": [1]}))
        b.request("write", link=link, stream=1, size=1000, end=False)
        a.request("received", link=link, stream=1, size=1000)
        b.request("teardown", link=link)
        assert a.expect("cut", link=link)["size"] == 1000


# ------------------------------------------------------------ proxy
def test_proxy_passes_everything_and_writes_it_down(space: Workspace) -> None:
    proxy = FrameProxy(free_port(), transcript=space.root / "transcript.jsonl")
    with pair(space, proxy=proxy) as (a, b):
        link = link_up(a, b, meet(a, b, on_link={"readers": [1]}))
        b.request("write", link=link, stream=1, size=200_000)
        assert a.expect("eof", link=link)["sha256"] == digest(random_bytes("s", 200_000))
        assert proxy.to_target.counts["dropped"] == 0 and proxy.to_target.counts["passed"] > 13
    rows = [json.loads(line) for line in (space.root / "transcript.jsonl").read_text().splitlines()]
    assert {row["dir"] for row in rows} == {"to_target", "to_client"}
    assert all(bytes.fromhex(row["frame"]) for row in rows)


def test_proxy_loses_one_frame_of_a_kind_and_the_message_is_repeated(space: Workspace) -> None:
    proxy = FrameProxy(free_port())
    with pair(space, proxy=proxy) as (a, b):
        dest = meet(a, b, on_link={"channel": {}})
        link = link_up(a, b, dest)
        proxy.to_target.drop_nth(is_channel, 2)
        proxy.to_client.drop_nth(is_packet_proof, 2)
        b.request("message", link=link, count=4, size=50)
        got = a.request("messages", link=link, count=4)
        assert got["in_order"] and got["sha256"] == series_digest("m", 4, 50)
        assert proxy.to_target.counts["dropped"] == 1 and proxy.to_client.counts["dropped"] == 1


def test_seeded_loss_on_channel_and_proofs(space: Workspace) -> None:
    proxy = FrameProxy(free_port(), seed=3)
    with pair(space, proxy=proxy) as (a, b):
        link = link_up(a, b, meet(a, b, on_link={"channel": {}}))
        for lane in (proxy.to_target, proxy.to_client):
            lane.drop_fraction = 0.05
        b.request(
            "message", link=link, count=48, size=100, timeout=60
        )  # more would kill a stock receiver: no range rule
        got = a.request("messages", link=link, count=48, timeout=60)
        assert got["in_order"] and got["sha256"] == series_digest("m", 48, 100)
        assert proxy.to_target.counts["dropped"] + proxy.to_client.counts["dropped"] > 0


def test_duplicates_and_neighbours_that_change_places_do_no_harm(space: Workspace) -> None:
    proxy = FrameProxy(free_port(), seed=5)
    with pair(space, proxy=proxy) as (a, b):
        link = link_up(a, b, meet(a, b, on_link={"channel": {}}))
        for lane in (proxy.to_target, proxy.to_client):
            lane.duplicate_fraction, lane.reorder_fraction = 0.2, 0.2
        b.request("message", link=link, count=100, size=100, timeout=60)
        got = a.request("messages", link=link, count=100, timeout=60)
        assert got["in_order"] and got["sha256"] == series_digest("m", 100, 100)
        assert proxy.to_target.counts["duplicated"] > 0 and proxy.to_target.counts["held"] > 0


def test_delay_shows_in_the_round_trip(space: Workspace) -> None:
    proxy = FrameProxy(free_port())
    with pair(space, proxy=proxy) as (a, b):
        dest = meet(a, b)
        proxy.to_target.delay = proxy.to_client.delay = 0.1
        assert 0.2 <= b.request("open", dest=dest, name=NAME)["rtt"] < 1.0


def test_a_lost_link_proof_means_no_link(space: Workspace) -> None:
    proxy = FrameProxy(free_port())
    with pair(space, proxy=proxy) as (a, b):
        dest = meet(a, b)
        proxy.to_client.drop_nth(is_link_proof, 1)
        seen = proxy.to_client.watch(is_link_proof)
        with pytest.raises(InteropError, match="no link within"):
            b.request("open", dest=dest, name=NAME, timeout=2)
        assert seen.is_set()


def test_swallowed_frames_vanish_while_the_connection_stays(space: Workspace) -> None:
    proxy = FrameProxy(free_port())
    with pair(space, proxy=proxy) as (a, b):
        link = link_up(a, b, meet(a, b, proof="all"))
        proxy.swallow()
        vanished = proxy.to_target.watch(is_link_data)
        assert b.request("link_send", link=link, data="01", wait=True, timeout=1)["status"] == "failed"
        assert vanished.is_set()
        proxy.swallow(False)
        assert b.request_proof("link_send", link=link, data="02")["status"] == "delivered"
        assert a.expect("link_packet", link=link)["data"] == "02"
        assert proxy.connections == 1


def test_a_cut_connection_comes_back(space: Workspace) -> None:
    proxy = FrameProxy(free_port())
    with pair(space, proxy=proxy) as (a, b):
        dest = meet(a, b, proof="all")
        back = proxy.to_target.watch(lambda frame: True)  # a node's first frame after it has connected again
        proxy.cut()
        assert back.wait(20) and proxy.connections == 2
        assert b.request("send", name=NAME, dest=dest, data="03")["status"] == "delivered"


# ------------------------------------------------------------ file transfer
def receiver(config: Path, out: Path, *options: str) -> Peer:
    """The stock receiver; `hello["text"]` is its destination hash."""
    command = [stock_python(), FILE_PEER, "receive", "--config", str(config), "--dir", str(out), "--once"]
    return Peer([*command, "--print-hash", *options], config, ready="line", takes_commands=False)


def send_file(config: Path, source: Path | bytes, dest: str, *options: str) -> dict[str, object]:
    """Run the stock sender to its end and return its JSON line; bytes go in through standard input."""
    standard = isinstance(source, bytes)
    command = [
        stock_python(),
        FILE_PEER,
        "send",
        "--config",
        str(config),
        "-" if standard else str(source),
        dest,
        *options,
    ]
    done = subprocess.run(command, input=source if standard else None, capture_output=True, timeout=90, check=False)
    lines = done.stdout.splitlines()
    assert lines, done.stderr.decode()
    last: dict[str, object] = json.loads(lines[-1])
    assert done.returncode == (0 if last["ok"] else 1)
    return last


@pytest.fixture
def sides(space: Workspace) -> tuple[Path, Path, Path]:
    """Configurations of a receiver and a sender, and the directory for files."""
    port = free_port()
    return (
        space.config("receiver", [tcp_server(port)]),
        space.config("sender", [tcp_client(port)]),
        space.directory("out"),
    )


@pytest.mark.parametrize("size", [0, 1, 1 << 20])
def test_a_file_arrives_whole(space: Workspace, sides: tuple[Path, Path, Path], size: int) -> None:
    here, there, out = sides
    source = space.root / "some file.bin"
    source.write_bytes(random_bytes(size, size))
    with receiver(here, out) as taking:
        sent = send_file(there, source, taking.hello["text"])
        got = taking.expect("json")
        assert taking.wait_exit(15) == 0
    assert sent["ok"] and got["ok"] and got["sha256"] == sent["sha256"] == digest(source.read_bytes())
    assert [path.name for path in out.iterdir()] == ["some file.bin"]
    assert (out / "some file.bin").read_bytes() == source.read_bytes()


def test_standard_input_has_no_size_and_a_taken_name_gets_a_number(sides: tuple[Path, Path, Path]) -> None:
    here, there, out = sides
    (out / "notes.txt").write_bytes(b"older")
    with receiver(here, out) as taking:
        sent = send_file(there, text_bytes(1, 50_000), taking.hello["text"], "--name", "notes.txt")
    assert sent["saved_as"] == "notes (1).txt"
    assert (out / "notes (1).txt").read_bytes() == text_bytes(1, 50_000) and (
        out / "notes.txt"
    ).read_bytes() == b"older"


def test_a_file_that_is_too_large_is_refused(space: Workspace, sides: tuple[Path, Path, Path]) -> None:
    here, there, out = sides
    (space.root / "large").write_bytes(bytes(1001))
    with receiver(here, out, "--max-size", "1000") as taking:
        sent = send_file(there, space.root / "large", taking.hello["text"])
    assert not sent["ok"] and "1001 bytes are more than the 1000" in str(sent["reason"])
    assert not list(out.iterdir())


def test_a_stream_that_grows_too_large_is_stopped(sides: tuple[Path, Path, Path]) -> None:
    here, there, out = sides
    with receiver(here, out, "--max-size", "100000") as taking:
        sent = send_file(there, random_bytes(1, 1 << 20), taking.hello["text"])
    assert not sent["ok"] and "more than 100000 bytes" in str(sent["reason"])
    assert not list(out.iterdir())


def test_an_allow_list_takes_who_identifies_and_nobody_else(space: Workspace, sides: tuple[Path, Path, Path]) -> None:
    here, there, out = sides
    with StockPeer(space.config("maker", [])) as maker:
        made = maker.request("identity")
    known = space.root / "known"
    known.write_bytes(bytes.fromhex(made["private"]))
    with receiver(here, out, "--allow", made["identity"]) as taking:
        sent = send_file(there, b"x", taking.hello["text"])
        assert not sent["ok"] and "not on the list" in str(sent["reason"])
    with receiver(here, out, "--allow", made["identity"]) as taking:
        assert send_file(there, b"x", taking.hello["text"], "--identity", str(known))["ok"]
        assert taking.expect("json")["peer"] == made["identity"]


def test_a_sender_that_is_interrupted_leaves_no_file_behind(space: Workspace, sides: tuple[Path, Path, Path]) -> None:
    here, there, out = sides
    with receiver(here, out, "--events") as taking:
        command = [stock_python(), FILE_PEER, "send", "--config", str(there), "-", taking.hello["text"]]
        with Peer(command, there, ready=None, takes_commands=False) as sending:
            sending.write("x" * 60_000)
            taking.expect("accepted")
            assert [path.suffix for path in out.iterdir()] == [".part"]
            sending.interrupt()
            got = taking.expect("json")
        assert not got["ok"] and "ended before" in got["reason"]
        assert taking.wait_exit(15) == 1
    assert not list(out.iterdir())
