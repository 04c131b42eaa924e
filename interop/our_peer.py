"""One of our nodes under remote control, for scenarios in which it dies: JSON lines in and out.

    python interop/our_peer.py --config DIR

The lines are those of `stock_peer.py`, and so are the commands, of which this knows a few:

    identity     private?                        -> identity, private, public
    destination  name, identity?, proof?         -> dest, identity
    announce     dest, app_data?                 -> dest
    wait_path    dest                            -> found, hops
    send         data, name, dest, wait?         -> status (delivered, failed, unsent, sent)
    quit

Events: ready; announce(dest, app_data, path_response, hops).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rnsfast import AnnounceHeard, Identity, Inbox, Node, PathNotFound

SLOW = {"wait_path", "send"}  # these wait, side by side with what comes after them


class OurNode:
    """The commands, one method each, named `do_…`."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._printing = threading.Lock()
        self._identities: dict[str, Identity] = {}
        self._inboxes: dict[str, Inbox] = {}

    def line(self, message: dict[str, Any]) -> None:
        with self._printing:
            print(json.dumps(message), flush=True)

    def heard(self, event: AnnounceHeard) -> None:
        self.line(
            {
                "event": "announce",
                "dest": event.destination.hex(),
                "app_data": None if event.app_data is None else event.app_data.hex(),
                "path_response": event.is_path_response,
                "hops": event.hops,
            }
        )

    def run(self) -> None:
        """Serve commands until quit or the end of input."""
        self.node.on_announce(self.heard)
        self.line({"event": "ready", "pid": os.getpid()})
        for text in sys.stdin:
            command = json.loads(text)
            name, number = command.pop("do"), command.pop("id")
            if name == "quit":
                self.line({"re": number, "ok": True})
                return
            if name in SLOW:
                threading.Thread(target=self._execute, args=(number, name, command), name=name, daemon=True).start()
            else:
                command.pop("timeout", None)
                self._execute(number, name, command)

    def _execute(self, number: int, name: str, arguments: dict[str, Any]) -> None:
        try:
            reply = {"re": number, "ok": True, **getattr(self, f"do_{name}")(**arguments)}
        except Exception as error:
            traceback.print_exc()
            reply = {"re": number, "ok": False, "error": f"{name}: {type(error).__name__}: {error}"}
        self.line(reply)

    def do_identity(self, private: str | None = None) -> dict[str, Any]:
        made = Identity() if private is None else Identity.from_private(bytes.fromhex(private))
        self._identities[made.hash.hex()] = made
        return {"identity": made.hash.hex(), "private": made.private_key.hex(), "public": made.public_key.hex()}

    def do_destination(self, name: str, identity: str | None = None, proof: str = "none") -> dict[str, Any]:
        owner = Identity() if identity is None else self._identities[identity]
        inbox = self.node.register(owner, *name.split("."))
        inbox.set_proofs(proof)
        self._inboxes[inbox.hash.hex()] = inbox
        return {"dest": inbox.hash.hex(), "identity": owner.hash.hex()}

    def do_announce(self, dest: str, app_data: str | None = None) -> dict[str, Any]:
        self._inboxes[dest].announce(None if app_data is None else bytes.fromhex(app_data))
        return {"dest": dest}

    def do_wait_path(self, dest: str, timeout: float = 15.0) -> dict[str, Any]:
        target = bytes.fromhex(dest)
        try:
            self.node.request_path(target, timeout)
        except PathNotFound:
            return {"found": False, "hops": None}
        return {"found": True, "hops": self.node.hops_to(target)}

    def do_send(self, data: str, name: str, dest: str, wait: bool = True, timeout: float = 15.0) -> dict[str, Any]:
        receipt = self.node.outbox(bytes.fromhex(dest), *name.split(".")).send(bytes.fromhex(data))
        if receipt is None:
            return {"status": "unsent"}
        if not wait:
            return {"status": "sent"}
        return {"status": "delivered" if receipt.wait(timeout) else "failed"}


def main() -> None:
    parser = argparse.ArgumentParser(description="one of our nodes under remote control")
    parser.add_argument("--config", required=True, help="configuration directory")
    with Node(parser.parse_args().config, strict=True) as node:
        OurNode(node).run()


if __name__ == "__main__":
    main()
