"""What the engine knows of an interface: identity, limits, counters and the queue of packets to send.

Interfaces own sockets, ports own bookkeeping (DESIGN, section 5).  Everything here is touched under the node's lock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum, IntEnum
from hashlib import sha256
from typing import Any, Final

from rnsfast.engine.disguise import Disguise
from rnsfast.engine.traffic import Traffic
from rnsfast.wire.drop import Drop
from rnsfast.wire.ifac import IfacKey, mask
from rnsfast.wire.packet import ANNOUNCE, DATA, HASHED_FLAGS, MTU, PLAIN
from rnsfast.wire.pathrequest import PATH_REQUEST_DESTINATION

DEFAULT_IFAC_SIZE: Final = 16  # bytes; counts in the size gate even without access codes (protocol 06, 1.4)

_PLAIN_DATA: Final = PLAIN << 2 | DATA


class Mode(IntEnum):
    """How announces and path requests travel over an interface.  Protocol 06, section 2.3."""

    FULL = 1
    POINT_TO_POINT = 2
    ACCESS_POINT = 3
    ROAMING = 4
    BOUNDARY = 5
    GATEWAY = 6
    INTERNAL = 7


class Local(Enum):
    """Whether an interface leads to another program of this machine.  Protocol 02, section 12."""

    NO = 0
    CLIENT = 1  # a program that uses our interfaces
    INSTANCE = 2  # the shared instance whose interfaces we use


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What a transport node lets in and out of an interface.  Protocol 02, sections 4.3, 7.4, 8; protocol 06, 1.6."""

    announce_cap: float = 0.02  # fraction of the bitrate
    announce_rate_target: int | None = None  # seconds
    announce_rate_grace: int | None = None
    announce_rate_penalty: int | None = None  # seconds
    announces_from_internal: bool = True
    announces_to_internal: bool | None = None
    recursive_prs: bool = False
    ingress_control: bool = True
    egress_control: bool = False
    ic_max_held_announces: int = 256
    ic_burst_hold: float = 15.0  # seconds
    ic_burst_penalty: float = 15.0  # seconds
    ic_held_release_interval: float = 5.0  # seconds
    ic_new_time: float = 7200.0  # seconds
    ic_burst_freq_new: float = 3.0  # per second
    ic_burst_freq: float = 10.0
    ic_pr_burst_freq_new: float = 3.0
    ic_pr_burst_freq: float = 8.0
    ec_pr_freq: float = 5.0


DEFAULT_POLICY: Final = Policy()


class Port:
    """One interface as the engine sees it.

    `hw_mtu` is bytes of a packet without access code. `upgradable` says whether links over it may have more than 500
    (protocol 03, 9.1). `online` and `congested` are set by the interface, which then calls `Engine.changed`.

    `local` says what is at the other end: another program on this machine, and such a connection is no hop.
    """

    __slots__ = (
        "_dirty",
        "announces",
        "bitrate",
        "congested",
        "disguise",
        "drops",
        "gone",
        "gravity",
        "hash",
        "hop",
        "hw_mtu",
        "ifac",
        "ifac_size",
        "last_size",
        "local",
        "mode",
        "name",
        "online",
        "outgoing",
        "owner",
        "policy",
        "queue",
        "requests",
        "rx_bytes",
        "rx_packets",
        "tx_bytes",
        "tx_packets",
        "upgradable",
        "wants_tunnel",
    )

    def __init__(
        self,
        name: str,
        *,
        interface_hash: bytes | None = None,
        mode: int = Mode.FULL,
        bitrate: int = 10_000_000,
        hw_mtu: int = 16384,
        upgradable: bool = True,
        ifac: IfacKey | None = None,
        ifac_size: int = DEFAULT_IFAC_SIZE,
        outgoing: bool = True,
        gravity: int = 0,
        policy: Policy = DEFAULT_POLICY,
        local: Local = Local.NO,
    ) -> None:
        self.name = name  # as displayed, `TCPInterface[name/host:port]`
        self.hash = interface_hash or sha256(name.encode()).digest()  # 32 bytes; a hint, not unique (protocol 06, 1.5)
        self.mode = Mode(mode)
        self.bitrate = bitrate  # bit/s
        self.hw_mtu = max(hw_mtu, MTU)
        self.upgradable = upgradable
        self.ifac = ifac
        self.ifac_size = ifac.size if ifac is not None else ifac_size
        self.outgoing = outgoing
        self.gravity = gravity  # of two that hear the same announce, the heavier one gets the path (protocol 02, 6.3)
        self.policy = policy
        self.local = local
        self.hop = 1 if local is Local.NO else 0  # what a packet's way here counts (protocol 02, 12.1)
        self.disguise: Disguise | None = None  # for what is sent with no hops yet
        self.online = False
        self.gone = False  # it was detached and does not come back
        self.congested = False
        self.wants_tunnel = False
        self.rx_packets = self.rx_bytes = self.tx_packets = self.tx_bytes = 0
        self.announces, self.requests = Traffic(), Traffic()  # of announces and of path requests
        self.drops: Counter[Drop] = Counter()
        self.last_size = 0  # bytes of the packet queued last by `send_many`
        self.queue: list[bytes] = []  # access codes applied; emptied by every flush, so bounded by one turn
        self.owner: Any = None  # the interface, for the runtime
        self._dirty: set[Port] = set()

    @property
    def offered_mtu(self) -> int:
        """The link MTU this interface offers: what it carries if that may be signalled, else 500."""
        return self.hw_mtu if self.upgradable else MTU

    def joined(self, dirty: set[Port]) -> None:
        """The engine says where ports that have something to send are noted."""
        self._dirty = dirty

    def send(self, raw: bytes) -> bool:
        """Queue one packet. False, and a counter, if the interface is offline or must not transmit."""
        if not (self.online and self.outgoing):
            self.drops[Drop.TX_OFFLINE] += 1
            return False
        if self.disguise is not None:
            raw = self.disguise(raw)
        kind = raw[0] & HASHED_FLAGS
        if kind == ANNOUNCE:
            self.announces.sent(len(raw))
        elif kind == _PLAIN_DATA and raw[2:18] == PATH_REQUEST_DESTINATION:
            self.requests.sent(len(raw))
        self.queue.append(raw if self.ifac is None else mask(raw, self.ifac))
        self._dirty.add(self)
        return True

    def send_many(self, raws: list[bytes]) -> bool:
        """Queue packets of links, or that are only passed on, in order. As `send`."""
        if not (self.online and self.outgoing):
            self.drops[Drop.TX_OFFLINE] += len(raws)
            return False
        key = self.ifac
        if self.disguise is not None:
            raws = [self.disguise(raw) for raw in raws]
        if raws:
            self.last_size = len(raws[-1])
        self.queue.extend(raws if key is None else [mask(raw, key) for raw in raws])
        self._dirty.add(self)
        return True

    def take(self) -> list[bytes]:
        """Everything queued, and the queue is empty again."""
        queue, self.queue = self.queue, []
        return queue

    def __repr__(self) -> str:
        return self.name
