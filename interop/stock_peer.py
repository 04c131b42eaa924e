"""A stock node under remote control: public API of `rns` only, JSON lines in and out.

    python interop/stock_peer.py --config DIR

Commands come as one JSON object a line, `{"id": n, "do": name, …}`; each gets one reply `{"re": n, "ok": true, …}` or
`{"re": n, "ok": false, "error": text}`. Commands that wait run side by side, the others in order. Events are lines
`{"event": name, …}`. Hashes, keys and content are hex. Standard output carries nothing else; what the stock package
prints goes to standard error. End of input means quit.

Node
    identity     private?                      -> identity, private, public      makes or loads one; `identity` names it
    destination  name, kind? (single, group, plain), identity?, key? (group, 64 bytes), ratchets? (path), proof? (none,
                 app, all), prove? (answer under app), accepts_links?, on_link? (setup), handlers? (list of paths: the
                 answer is the data that was sent), announce?, app_data?    -> dest, identity
    announce     dest, app_data?               -> dest
    known        dest                          -> known, identity?, app_data?, ratchet
    request_path dest; has_path dest -> has; hops dest -> hops; wait_path dest -> found, hops
    send         data, name, kind?, dest?, identity?, key?, wait?   -> status (delivered, failed, unsent, sent), rtt?
    stats        -> interfaces, links, cpu, rss, threads
    quit
Link: `link` is the link id
    open         dest, name, setup?, proof?, prove?  -> link, status, rtt, mtu, mdu, …  (error when it does not come up)
    link_info    link                  link_send  link, data, wait?  -> status, rtt?
    identify     link, identity        teardown   link
    channel      link, echo?, sleep?, sleep_at?, events?          opens the channel, or changes its options
    message      link, count?, size?, seed?, first?               -> count, sha256, seconds
    messages     link, count           waits for that many        -> count, size, sha256, first, last, in_order
    reader       link, stream, chunk?, delay?       pipe  link, receive, send
    received     link, stream, size?   waits for size or the end  -> size, sha256, eof, ended
    write        link, stream, kind?, seed?, size | data, tries?, how? (kind, buffered), end?  -> size, sha256, seconds
    request      link, path, data?     -> data, status            resource  link, kind?, seed?, size  -> status, sha256
Events
    ready; announce(dest, identity, app_data, ratchet, path_response, hops); packet(dest, data, ratchet);
    link(link, dest, initiator, rtt, mtu, mdu, …); closed(link, reason: timeout, initiator, destination);
    identified(link, identity); link_packet(link, data); message(link, number, data);
    eof(link, stream, size, sha256); cut(the same: the link ended first); resource(link, complete, size, sha256)

`setup`, `on_link` and the channel options are described in `stock_link.py`, seeded content in `seeded.py`, commands
about management in `stock_management.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import resource as usage
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import RNS

from interop.seeded import data as seeded_data
from interop.stock_link import STATES, Session
from interop.stock_management import ManagementCommands, hurry

KINDS = {"single": RNS.Destination.SINGLE, "group": RNS.Destination.GROUP, "plain": RNS.Destination.PLAIN}
PROOFS = {"none": RNS.Destination.PROVE_NONE, "app": RNS.Destination.PROVE_APP, "all": RNS.Destination.PROVE_ALL}
SLOW = {"wait_path", "send", "open", "link_send", "message", "messages", "received", "write", "request", "resource"}
SLOW |= {"ask", "wait_banned"}
LEAVE_WITHIN = 4.0  # seconds for an orderly exit


def unhex(text: str | None) -> bytes | None:
    return None if text is None else bytes.fromhex(text)


class StockNode(ManagementCommands):
    """The commands, one method each, named `do_…`."""

    def __init__(self, config: str) -> None:
        self._lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)  # whatever prints from now on does not disturb the lines
        # The search for stamps forks: children must not keep the lines open, nor find standard input being read.
        os.register_at_fork(after_in_child=lambda: os.dup2(2, self._lines.fileno()))
        self._commands = os.fdopen(os.dup(0), encoding="utf-8")
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
        self._printing = threading.Lock()
        self._identities: dict[str, Any] = {}
        self._destinations: dict[str, Any] = {}
        self._sessions: dict[str, Session] = {}
        self._received = 0
        self.reticulum = RNS.Reticulum(config, logdest=lambda text: print(text, file=sys.stderr, flush=True))
        RNS.Transport.register_announce_handler(Announces(self))

    def emit(self, event: str, **values: Any) -> None:
        self.line({"event": event, **values})

    def line(self, message: dict[str, Any]) -> None:
        text = json.dumps(message)
        with self._printing:
            self._lines.write(text + "\n")
            self._lines.flush()

    def run(self) -> None:
        """Serve commands until quit or the end of input."""
        self.emit("ready", pid=os.getpid(), version=RNS.version(), transport=RNS.Reticulum.transport_enabled())
        for text in self._commands:
            try:
                command = json.loads(text)
                name, number = command.pop("do"), command.pop("id")
            except (ValueError, KeyError, AttributeError) as error:
                self.emit("trouble", error=f"not a command ({error!r}): {text[:200]}")
                continue
            if name == "quit":
                self.line({"re": number, "ok": True})
                return
            if name in SLOW:
                threading.Thread(target=self._execute, args=(number, name, command), name=name, daemon=True).start()
            else:
                self._execute(number, name, command)

    def _execute(self, number: int, name: str, arguments: dict[str, Any]) -> None:
        try:
            method: Callable[..., dict[str, Any] | None] | None = getattr(self, f"do_{name}", None)
            if method is None:
                raise ValueError(f"no command {name!r}")
            if name not in SLOW:
                arguments.pop("timeout", None)
            reply = {"re": number, "ok": True, **(method(**arguments) or {})}
        except Exception as error:
            traceback.print_exc()
            reply = {"re": number, "ok": False, "error": f"{name}: {type(error).__name__}: {error}"}
        self.line(reply)

    # -- identities and destinations
    def do_identity(self, private: str | None = None) -> dict[str, Any]:
        identity = RNS.Identity() if private is None else RNS.Identity.from_bytes(bytes.fromhex(private))
        if identity is None:
            raise ValueError("these are no private keys")
        self._identities[identity.hash.hex()] = identity
        private, public = identity.get_private_key().hex(), identity.get_public_key().hex()
        return {"identity": identity.hash.hex(), "private": private, "public": public}

    def do_destination(
        self,
        name: str,
        kind: str = "single",
        identity: str | None = None,
        key: str | None = None,
        ratchets: str | None = None,
        proof: str = "none",
        prove: bool = True,
        accepts_links: bool = True,
        on_link: dict[str, Any] | None = None,
        handlers: list[str] | None = None,
        announce: bool = False,
        app_data: str | None = None,
    ) -> dict[str, Any]:
        owner = None
        if kind != "plain":
            owner = self._identities[identity] if identity else RNS.Identity()
            self._identities[owner.hash.hex()] = owner
        app, *aspects = name.split(".")
        destination = RNS.Destination(owner, RNS.Destination.IN, KINDS[kind], app, *aspects)
        dest = destination.hash.hex()
        if key is not None:
            destination.load_private_key(bytes.fromhex(key))
        if ratchets:
            destination.enable_ratchets(ratchets)
        if kind != "plain":
            destination.set_proof_strategy(PROOFS[proof])
            destination.set_proof_requested_callback(lambda packet: prove)
        destination.accepts_links(accepts_links)
        destination.set_packet_callback(lambda content, packet: self._on_packet(dest, content, packet))
        destination.set_link_established_callback(lambda link: self._on_link(dest, on_link, link))
        for path in handlers or ():
            destination.register_request_handler(path, answer_with_the_same, allow=RNS.Destination.ALLOW_ALL)
        self._destinations[dest] = destination
        if app_data is not None:
            destination.set_default_app_data(bytes.fromhex(app_data))  # for answers to path requests as well
        if announce:
            destination.announce()
        return {"dest": dest, "identity": owner.hash.hex() if owner else None}

    def _on_packet(self, dest: str, content: bytes, packet: Any) -> None:
        self._received += 1
        used = getattr(packet, "ratchet_id", None)
        self.emit("packet", dest=dest, data=content.hex(), ratchet=used.hex() if used else None)

    def _on_link(self, dest: str, setup: dict[str, Any] | None, link: Any) -> None:
        session = Session(self.emit, setup, dest)
        self._sessions[link.link_id.hex()] = session
        session.established(link)

    def do_announce(self, dest: str, app_data: str | None = None) -> dict[str, Any]:
        self._destinations[dest].announce(unhex(app_data))
        return {"dest": dest}

    def do_known(self, dest: str) -> dict[str, Any]:
        target = bytes.fromhex(dest)
        identity = RNS.Identity.recall(target)
        if identity is None:
            return {"known": False, "ratchet": False}
        about = RNS.Identity.recall_app_data(target)
        return {
            "known": True,
            "identity": identity.hash.hex(),
            "app_data": None if about is None else about.hex(),
            "ratchet": RNS.Identity.get_ratchet(target) is not None,
        }

    # -- paths
    def do_request_path(self, dest: str) -> None:
        RNS.Transport.request_path(bytes.fromhex(dest))

    def do_has_path(self, dest: str) -> dict[str, Any]:
        return {"has": bool(RNS.Transport.has_path(bytes.fromhex(dest)))}

    def do_hops(self, dest: str) -> dict[str, Any]:
        return {"hops": RNS.Transport.hops_to(bytes.fromhex(dest))}

    def do_wait_path(self, dest: str, timeout: float = 15.0) -> dict[str, Any]:
        target = bytes.fromhex(dest)
        found = bool(RNS.Transport.await_path(target, timeout=timeout))
        return {"found": found, "hops": RNS.Transport.hops_to(target) if found else None}

    # -- packets
    def _outward(self, name: str, kind: str, dest: str | None, identity: str | None, key: str | None = None) -> Any:
        owner = None
        if kind != "plain":
            owner = self._identities[identity] if identity else RNS.Identity.recall(bytes.fromhex(dest or ""))
            if owner is None:
                raise ValueError(f"the identity of {dest} is not known here")
        app, *aspects = name.split(".")
        destination = RNS.Destination(owner, RNS.Destination.OUT, KINDS[kind], app, *aspects)
        if dest is not None and destination.hash.hex() != dest:
            raise ValueError(f"{name} of that identity is {destination.hash.hex()}, not {dest}")
        if key is not None:
            destination.load_private_key(bytes.fromhex(key))
        return destination

    def do_send(
        self,
        data: str,
        name: str,
        kind: str = "single",
        dest: str | None = None,
        identity: str | None = None,
        key: str | None = None,
        wait: bool = True,
        timeout: float = 15.0,
    ) -> dict[str, Any]:
        packet = RNS.Packet(self._outward(name, kind, dest, identity, key), bytes.fromhex(data))
        return outcome(packet, wait and kind == "single", timeout)

    # -- links
    def _session(self, link: str) -> Session:
        if link not in self._sessions:
            raise ValueError(f"no link {link}")
        return self._sessions[link]

    def do_open(
        self,
        dest: str,
        name: str,
        setup: dict[str, Any] | None = None,
        proof: str = "none",
        prove: bool = True,
        timeout: float = 15.0,
    ) -> dict[str, Any]:
        destination = self._outward(name, "single", dest, None)
        destination.set_proof_strategy(PROOFS[proof])
        destination.set_proof_requested_callback(lambda packet: prove)
        session = Session(self.emit, setup, dest)
        ended = threading.Event()

        def closed(link: Any) -> None:
            session.on_closed(link)
            ended.set()
            session.up.set()

        link = RNS.Link(destination, established_callback=session.established, closed_callback=closed)
        self._sessions[link.link_id.hex()] = session
        if not session.up.wait(timeout):
            raise TimeoutError(f"no link within {timeout} s, it is {STATES.get(link.status)}")
        if ended.is_set():
            raise ConnectionError("the link was closed before it was established")
        return session.describe()

    def do_link_info(self, link: str) -> dict[str, Any]:
        return self._session(link).describe()

    def do_link_send(self, link: str, data: str, wait: bool = False, timeout: float = 15.0) -> dict[str, Any]:
        return outcome(RNS.Packet(self._session(link).link, bytes.fromhex(data)), wait, timeout)

    def do_identify(self, link: str, identity: str) -> None:
        self._session(link).link.identify(self._identities[identity])

    def do_teardown(self, link: str) -> None:
        self._session(link).link.teardown()

    def do_channel(self, link: str, **options: Any) -> None:
        self._session(link).open_messages(**options)

    def do_message(
        self, link: str, count: int = 1, size: int = 100, seed: str = "m", first: int = 0, timeout: float = 60.0
    ) -> dict[str, Any]:
        return self._session(link).send_series(count, size, seed, first, timeout)

    def do_messages(self, link: str, count: int, timeout: float = 60.0) -> dict[str, Any]:
        return self._session(link).wait_messages(count, timeout)

    def do_reader(self, link: str, stream: int, chunk: int = 65536, delay: float = 0.0) -> None:
        self._session(link).open_reader(stream, chunk, delay)

    def do_pipe(self, link: str, receive: int, send: int) -> None:
        self._session(link).open_reader(receive, back=send)

    def do_received(self, link: str, stream: int, size: int | None = None, timeout: float = 60.0) -> dict[str, Any]:
        return self._session(link).wait_received(stream, size, timeout)

    def do_write(
        self,
        link: str,
        stream: int,
        data: str | None = None,
        kind: str = "random",
        seed: str = "s",
        size: int = 0,
        tries: int = 1,
        how: str = "kind",
        end: bool = True,
        timeout: float = 60.0,
    ) -> dict[str, Any]:
        return self._session(link).write(stream, unhex(data), kind, seed, size, tries, how, end)

    def do_request(self, link: str, path: str, data: str | None = None, timeout: float = 15.0) -> dict[str, Any]:
        done = threading.Event()
        receipt = self._session(link).link.request(
            path, unhex(data), lambda r: done.set(), lambda r: done.set(), timeout=timeout
        )
        if receipt is False or not done.wait(timeout + 5):
            return {"status": "unsent" if receipt is False else "waiting", "data": None}
        answer = receipt.get_response()
        ready = receipt.get_status() == RNS.RequestReceipt.READY
        return {"status": "ready" if ready else "failed", "data": answer.hex() if isinstance(answer, bytes) else answer}

    def do_resource(
        self, link: str, size: int, kind: str = "random", seed: str = "r", timeout: float = 60.0
    ) -> dict[str, Any]:
        content, done = seeded_data(kind, seed, size), threading.Event()
        sent = RNS.Resource(content, self._session(link).link, callback=lambda r: done.set())
        complete = done.wait(timeout) and sent.status == RNS.Resource.COMPLETE
        return {"complete": complete, "status": sent.status, "sha256": hashlib.sha256(content).hexdigest()}

    # -- statistics
    def do_stats(self) -> dict[str, Any]:
        table = self.reticulum.get_interface_stats()["interfaces"]
        keys = ("name", "short_name", "type", "status", "rxb", "txb", "clients")
        links = [session.describe() for session in self._sessions.values() if session.link is not None]
        return {
            "interfaces": [{key: one.get(key) for key in keys} for one in table],
            "links": links,
            "packets": self._received,
            "cpu": time.process_time(),
            "rss": usage.getrusage(usage.RUSAGE_SELF).ru_maxrss * 1024,
            "threads": threading.active_count(),
        }


class Announces:
    """Handler for all announces; the stock package looks for these names."""

    aspect_filter = None
    receive_path_responses = True

    def __init__(self, node: StockNode) -> None:
        self._node = node

    def received_announce(
        self,
        destination_hash: bytes,
        announced_identity: Any,
        app_data: bytes | None,
        announce_packet_hash: bytes,
        is_path_response: bool,
    ) -> None:
        self._node.emit(
            "announce",
            dest=destination_hash.hex(),
            identity=announced_identity.hash.hex(),
            app_data=None if app_data is None else app_data.hex(),
            ratchet=RNS.Identity.get_ratchet(destination_hash) is not None,
            path_response=bool(is_path_response),
            hops=RNS.Transport.hops_to(destination_hash),
        )


def answer_with_the_same(path: str, data: Any, request_id: bytes, remote_identity: Any, requested_at: float) -> Any:
    """Request handler: the answer is what was asked."""
    return data


def outcome(packet: Any, wait: bool, timeout: float) -> dict[str, Any]:
    """Send and, if wanted, wait until the packet is proved or given up."""
    done = threading.Event()
    receipt = packet.send()
    if not receipt:
        return {"status": "unsent" if receipt is False else "sent"}
    if not wait:
        return {"status": "sent"}
    receipt.set_timeout(timeout)
    receipt.set_delivery_callback(lambda r: done.set())
    receipt.set_timeout_callback(lambda r: done.set())
    if receipt.get_status() == RNS.PacketReceipt.SENT:  # it may have been proved before there was a callback
        done.wait(timeout + 3)
    if receipt.get_status() == RNS.PacketReceipt.DELIVERED:
        return {"status": "delivered", "rtt": receipt.get_rtt()}
    return {"status": "failed"}


def main() -> None:
    parser = argparse.ArgumentParser(description="a stock node under remote control")
    parser.add_argument("--config", required=True, help="configuration directory")
    parser.add_argument("--hurry", action="store_true", help="let jobs look every second instead of every minute")
    arguments = parser.parse_args()
    if arguments.hurry:
        hurry()
    node = StockNode(arguments.config)
    node.run()
    late = threading.Timer(LEAVE_WITHIN, os._exit, args=(3,))
    late.daemon = True
    late.start()
    for child in multiprocessing.active_children():  # the exit below leaves them behind
        child.kill()
    RNS.exit(0)


if __name__ == "__main__":
    main()
