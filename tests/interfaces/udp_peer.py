"""One UDPInterface in a process of its own: commands as JSON lines in, replies as JSON lines out.

    open   listen, forward, batch?, segmentation?   bind and go online
    close                                           end the interface
    send   batches                                  one flush for each list of sizes; -> numbers of the first and last
    mark   number                                   one small packet that is no part of the numbered ones
    wait   count                                    event "arrived" once so many numbered packets are there
    take                                            -> packets: [number, size] as they came, spoiled; forgets them
    state                                           -> drops, sent, segmentation, turns, cpu, warnings, connection
    quit

The event "marked" says that a mark arrived. Numbered packets begin with their number, and the rest follows from it.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from rnsfast.engine.port import Port
from rnsfast.interfaces.common import CommonConfig
from rnsfast.interfaces.udp import UdpConfig, UdpInterface
from rnsfast.osio.poller import READ
from tests.fakes import FakeRuntime

MARK = b"\xff\xff\xff\xff"


def content(number: int, size: int) -> bytes:
    head = number.to_bytes(4, "big")
    return (head + bytes([number % 251]) * max(0, size - 4))[:size]


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Helper:
    def __init__(self) -> None:
        self.runtime = FakeRuntime()
        self.runtime.on_deliver = self.take_in
        self.warnings = Warnings()
        logging.getLogger().addHandler(self.warnings)
        self.interface: UdpInterface | None = None
        self.next = 0
        self.packets: list[tuple[int, int]] = []
        self.spoiled = 0
        self.wanted = 0
        self.turns = 0
        self.buffer = b""
        self.running = True

    def say(self, **message: Any) -> None:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()

    def take_in(self, port: Port, batch: list[bytes]) -> None:
        for raw in batch:
            if raw.startswith(MARK):
                self.say(event="marked", number=int.from_bytes(raw[4:8], "big"))
                continue
            number = int.from_bytes(raw[:4], "big")
            self.spoiled += raw != content(number, len(raw))
            self.packets.append((number, len(raw)))
        self.runtime.received.clear()
        self.runtime.batches.clear()
        if self.wanted and len(self.packets) >= self.wanted:
            self.wanted = 0
            self.say(event="arrived", count=len(self.packets))

    # commands

    def do_open(self, listen: list[Any], forward: list[Any], **options: Any) -> dict[str, Any]:
        made = UdpConfig(
            common=CommonConfig(name="x"),
            listen_ip=listen[0],
            listen_port=listen[1],
            forward_ip=forward[0],
            forward_port=forward[1],
            **options,
        )
        self.interface = UdpInterface(made)
        self.interface.start(self.runtime)
        return {"online": self.interface.port.online}

    def do_close(self) -> dict[str, Any]:
        assert self.interface is not None
        self.interface.close()
        self.runtime.make_due_calls()
        return {}

    def put(self, packets: list[bytes]) -> None:
        assert self.interface is not None
        self.interface.port.send_many(packets)
        self.interface.flush(self.interface.port)

    def do_send(self, batches: list[list[int]]) -> dict[str, Any]:
        # One processor: the packets of a sender that moves to another may overtake each other in the system.
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        first = self.next
        for sizes in batches:
            self.put([content(self.next + place, size) for place, size in enumerate(sizes)])
            self.next += len(sizes)
        return {"first": first, "last": self.next - 1}

    def do_mark(self, number: int) -> dict[str, Any]:
        self.put([MARK + number.to_bytes(4, "big") + b"\0" * 12])
        return {}

    def do_wait(self, count: int) -> dict[str, Any]:
        if len(self.packets) >= count:
            self.say(event="arrived", count=len(self.packets))
        else:
            self.wanted = count
        return {}

    def do_take(self) -> dict[str, Any]:
        packets, self.packets = self.packets, []
        return {"packets": packets, "spoiled": self.spoiled}

    def do_state(self) -> dict[str, Any]:
        assert self.interface is not None
        port, connection = self.interface.port, self.interface._connection
        return {
            "drops": {drop.value: count for drop, count in port.drops.items()},
            "sent": port.tx_packets,
            "segmentation": connection is not None and getattr(connection._io, "segmentation", False),
            "turns": self.turns,
            "cpu": time.process_time(),
            "warnings": self.warnings.lines,
            "reports": self.runtime.reports,
            **self.interface.status(),
        }

    def do_quit(self) -> dict[str, Any]:
        self.running = False
        return {}

    # the loop

    def on_input(self, events: int) -> None:
        data = os.read(0, 1 << 16)
        if not data:
            self.running = False
            return
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            number, do = message.pop("id"), message.pop("do")
            message.pop("timeout", None)
            try:
                self.say(re=number, ok=True, **getattr(self, f"do_{do}")(**message))
            except Exception as error:
                self.say(re=number, ok=False, error=repr(error))

    def run(self) -> None:
        self.runtime.watch(0, READ, self.on_input)
        self.say(event="ready")
        while self.running:
            self.turns += 1
            self.runtime.handle_ready(600.0)
        if self.interface is not None:
            self.interface.close()
        self.runtime.unwatch(0)
        self.runtime.close()


if __name__ == "__main__":
    Helper().run()
