"""Applications in a network that changes under them: transfers fail and are begun again, and none is ever wrong."""

from __future__ import annotations

import random

import pytest

from rnsfast.engine.destination import Destination
from rnsfast.engine.link import Link
from rnsfast.engine.linkstate import State
from tests.engine.test_faults import Transfer
from tests.sim.network import Network
from tests.virtualnet import SimNode

SIZE = 150_000
PATIENCE = 900.0  # seconds for one transfer, all attempts together


class Download:
    """One transfer, begun again over a new link whenever the old one fails."""

    def __init__(self, net: Network, source: SimNode, place: Destination, owner: SimNode, seed: int) -> None:
        self.net, self.source, self.place, self.owner = net, source, place, owner
        self.data = random.Random(seed).randbytes(SIZE)
        self.attempts = 0
        self.done = False
        self._asked_at = 0.0
        self._link: Link | None = None
        self._transfer: Transfer | None = None

    def turn(self) -> None:
        """Go on with it, as an application would, every quarter of a second."""
        if self.done:
            return
        if self._link is None or self._link.state is State.CLOSED:
            self._transfer = None
            if self.source.engine.paths.usable(self.place.hash) is None:
                if self.net.now >= self._asked_at + 5.0:
                    self._asked_at = self.net.now
                    self.source.engine.announcing.request_path(self.place.hash, self.net.now)
                return
            self.attempts += 1
            self._link = self.source.engine.open_link(self.source.outbound(self.place), self.net.now)
        elif self._link.state is State.ACTIVE:
            if self._transfer is None:
                # The packet that tells the round trip is sent once; if it is lost, the next one activates the far end.
                self._link.send_data(b"hello", self.net.now)
                far = self.owner.engine.links.get(self._link.link_id)
                if far is None or far.state is not State.ACTIVE:
                    return
                self._transfer = Transfer(self.net, self._link, far, self.data)
            if self._transfer.receiver.link.state is State.CLOSED:
                self._link.close(self.net.now)
            elif self._transfer.turn():
                self._transfer.check()
                self.done = True
                self._link.close(self.net.now)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(n, marks=pytest.mark.soak) for n in range(3, 30))])
def test_downloads_end_well_while_cables_and_relays_come_and_go(seed: int) -> None:
    net = Network(seed)
    relays = net.relays(9)
    net.grid(relays, 3, paced=True, bitrate=200_000, hw_mtu=1064)
    ends = [net.node(f"e{i}") for i in range(4)]
    for i, end in enumerate(ends):
        net.join(end, relays[(0, 2, 6, 8)[i]])
        net.join(end, relays[(1, 5, 3, 7)[i]])
    places = {end: net.announce(end) for end in ends}
    net.settle()
    cables = list(zip(net.wires[::2], net.wires[1::2], strict=True))
    for wire in net.wires:
        wire.loss = 0.005
    downloads = [
        Download(net, a, places[b], b, n)
        for n, (a, b) in enumerate((a, b) for a in ends for b in ends if a is not b and net.random.random() < 0.6)
    ]
    end_of_trouble = net.now + 120.0

    def trouble(_: int) -> None:
        if net.now > end_of_trouble:
            return
        if net.random.random() < 0.2:
            net.restart(net.random.choice(relays), noticed=net.random.random() < 0.5)
        else:
            cable = net.random.choice(cables)
            net.cut(cable, down=net.random.random() < 0.5)
            net.call_at(net.now + net.random.uniform(1.0, 20.0), lambda: net.mend(cable))

    def turn(_: int) -> None:
        for download in downloads:
            download.turn()
        net.flush()

    net.every(6.0, 20, trouble)
    net.every(45.0, int(PATIENCE / 45), lambda _: [net.announce(end, destination=places[end]) for end in ends])
    net.every(0.25, int(PATIENCE * 4), turn)
    net.run(PATIENCE, lambda: all(download.done for download in downloads))
    assert all(download.done for download in downloads), [download.attempts for download in downloads]
    for relay in relays:
        assert relay.engine.transport is not None and not relay.engine.transport.links.unproved
    print(f"seed {seed}: {len(downloads)} downloads, {sum(d.attempts for d in downloads)} attempts")
