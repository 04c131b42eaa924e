"""Reaching the peer: find a path, ask for a link, and again later if that fails. Never waits.  docs/tun.md, Outages."""

from __future__ import annotations

import time
from math import inf
from typing import Final

from rnsfast.errors import PathNotFound
from rnsfast.node.link import Link
from rnsfast.node.node import Node

FIRST_PAUSE: Final = 1.0  # seconds to the second attempt; each further pause is twice as long
LONGEST_PAUSE: Final = 10.0  # seconds

News = tuple[tuple[bytes, int] | None, frozenset[int]]


class Dialer:
    """One attempt at a time. `attend` is called whenever something may have changed, and at `due`.

    A fresh announce of the peer, or an interface that comes up, is worth an attempt at once.
    """

    def __init__(self, node: Node, peer: bytes, app: str, aspect: str) -> None:
        self._node, self._reactor = node, node._reactor
        self.peer = peer
        self._app, self._aspects = app, (aspect,)
        self._pending: Link | None = None
        self._pause = FIRST_PAUSE
        self._asking = False  # for a path: the pauses count for that
        self._retry_at = 0.0
        self._tried: News | None = None
        self.problem = ""  # why the last attempt failed
        self.fault: str | None = None  # why no attempt can succeed
        self.due = inf

    @property
    def links(self) -> tuple[Link, ...]:
        """Those asked for and not answered yet: at most one."""
        return () if self._pending is None else (self._pending,)

    @property
    def connecting(self) -> str:
        hops = self._node.hops_to(self.peer)
        return f"to {self.peer.hex()}" + ("" if hops is None else f", {hops} hop{'' if hops == 1 else 's'}")

    def _news(self, ports: frozenset[int]) -> News:
        with self._reactor.lock:
            path = self._reactor.engine.paths.usable(self.peer)
            return None if path is None else (path.packet_hash, path.confirmed), ports

    def failed(self, problem: str, now: float) -> None:
        """An attempt came to nothing."""
        self.problem = problem
        self._retry_at = now + self._pause
        self._pause = min(self._pause * 2, LONGEST_PAUSE)

    def lost(self, problem: str, now: float) -> None:
        """What there was is gone: the next attempt is due now."""
        self.problem = problem
        self._retry_at = min(self._retry_at, now)

    def succeeded(self) -> None:
        """Whoever made it, there is a link that carries traffic."""
        self._pause, self._retry_at, self.problem = FIRST_PAUSE, 0.0, ""

    def attend(self, now: float, ports: frozenset[int], *, wanted: bool) -> Link | None:
        """Do what is due. Returns a link that has just been established."""
        self.due = inf
        news = self._news(ports)
        if self._pending is not None:
            link = self._look_at(self._pending, news, now, wanted)
            if link is not None or self.links:
                return link
            news = self._news(ports)  # giving a link up may give up the path
        if not wanted:
            self._tried = news  # what is known while there is a link is no news when it ends
        elif self.fault is None and (now >= self._retry_at or self._is_better(news)):
            self._attempt(news, now)
        elif self.fault is None:
            self.due = self._retry_at
        return None

    def _look_at(self, link: Link, news: News, now: float, wanted: bool) -> Link | None:
        """What has become of the link asked for: it if it is there, and is forgotten as pending unless it still is."""
        if wanted and link.is_active:
            self._pending = None
            return link
        if not link._engine.port.online or (wanted and news[0] is None and link._engine.is_open):
            self.failed("the interface that leads to the peer is down", now)
        elif not link._engine.is_open:
            self.failed(f"{self.peer.hex()} did not answer the link request", now)
        elif wanted and not self._is_better(news):
            return None
        # Else it is not needed, or the peer has begun anew, or an interface that swallowed the request has.
        self._pending = None
        link.close()
        return None

    def _is_better(self, news: News) -> bool:
        """Whether something is new since the last attempt that may help."""
        if self._tried is None:
            return True
        path, ports = news
        return (path is not None and path != self._tried[0]) or not ports <= self._tried[1]

    def _attempt(self, news: News, now: float) -> None:
        self._tried = news
        with self._reactor.turn as turn:
            engine = self._reactor.engine
            known = engine.recall(self.peer, time.time()) is not None
            if news[0] is None or not known:
                engine.announcing.request_path(self.peer, turn)
                found = False
            else:
                found = True
        if found:
            if self._asking:
                self._asking, self._pause = False, FIRST_PAUSE
            try:
                self._pending = self._node._ask_for_link(self.peer, self._app, self._aspects)
            except PathNotFound as error:
                self.failed(str(error), now)
            except ValueError:
                self.fault = f"{self.peer.hex()} is not the address of a tunnel: `rnsfast tun id` prints it over there"
                return
        else:
            self._asking = True
            self._retry_at = now + self._pause
            self._pause = min(self._pause * 2, LONGEST_PAUSE)
        self.due = self._retry_at if self._pending is None else inf
