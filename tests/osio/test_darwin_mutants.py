"""The tests of the macOS back ends notice when those are broken: one change a time, and some test has to fail.

A mutant is a method with a piece of its source replaced. The tests are run as they are, on the mutant, in this process,
until one fails.
"""

from __future__ import annotations

import errno
import inspect
import itertools
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import pytest

from rnsfast.osio import darwin, msgx, utun
from rnsfast.osio.darwin import DarwinDatagramIO
from rnsfast.osio.msgx import Headers, MsgxIO
from rnsfast.osio.utun import UtunIO
from rnsfast.osio.verdicts import Verdict, forget_what_was_logged
from tests.osio import test_darwin, test_darwin_kernel, test_darwin_send, test_utun
from tests.osio.darwin_makers import datagram_pairs, devices, scripted_datagrams, scripted_devices

pytestmark = pytest.mark.linux  # whose sockets the stand-ins use, and their errors

MODULES = (test_darwin_send, test_darwin, test_utun, test_darwin_kernel)
MAKERS: dict[str, Callable[[ExitStack], Any]] = {
    "stack": lambda stack: stack,
    "scripted_darwin": scripted_datagrams,
    "darwin_pair": datagram_pairs,
    "scripted_utun": scripted_devices,
    "utun": devices,
}

Mutant = tuple[type, str, str, str]

MUTANTS: list[Mutant] = [
    # The batch writer
    (MsgxIO, "_submit", "sendmsg_x is None or", "False or"),
    (MsgxIO, "_submit", "not self._connected or", ""),
    (MsgxIO, "_submit", " or peers is not None", ""),
    (MsgxIO, "_submit", "items[first:stop]", "items[first:]"),
    (MsgxIO, "_submit", "items[first:stop]", "items[first : stop - 1]"),
    (MsgxIO, "_submit", "items[first:stop]", "items[:stop]"),
    (MsgxIO, "_submit", "headers.address, count", "headers.address, count - 1"),
    (MsgxIO, "_submit", "headers.address, count", "headers.address + 56, count"),
    (MsgxIO, "_submit", "MSG_DONTWAIT", "0"),
    (MsgxIO, "_submit", "self._batched = True", "pass"),
    (MsgxIO, "_submit", "if taken > count", "if False"),
    (MsgxIO, "_submit", "if taken > count", "if taken >= count"),
    (MsgxIO, "_submit", "errno.EPROTO", "errno.EAGAIN"),
    (MsgxIO, "_submit", "if error == errno.EMSGSIZE", "if False"),
    (MsgxIO, "_submit", "chunk[0], None", "chunk[-1], None"),
    (MsgxIO, "_submit", "return 0 if error else 1, error", "return 1, error"),
    (MsgxIO, "_submit", "return 0 if error else 1, error", "return 0, error"),
    (MsgxIO, "_submit", "return 0 if error else 1, error", "return count, 0"),
    (MsgxIO, "_submit", "self.stats.tx_calls += 1", "pass"),
    (MsgxIO, "_submit", "return max(taken, 0), error", "return count, 0"),
    (MsgxIO, "_submit", "return max(taken, 0), error", "return taken, error"),
    (MsgxIO, "_submit", "return max(taken, 0), error", "return max(taken - 1, 0), error"),
    (MsgxIO, "_submit_one", "self._batched = False", "pass"),
    (MsgxIO, "_submit_plainly", "return at - first, error", "return at - first + 1, error"),
    (MsgxIO, "_submit_plainly", "return at - first, error", "return 0, error"),
    (MsgxIO, "_submit_plainly", "return stop - first, 0", "return stop - first - 1, 0"),
    (MsgxIO, "_judge", "if not self._batched", "if False"),
    (MsgxIO, "_judge", "if not self._batched", "if True"),
    (MsgxIO, "_judge", "if error in REFUSED", "if False"),
    (MsgxIO, "_judge", "Verdict.AGAIN", "Verdict.REJECT"),
    (MsgxIO, "_judge", "Verdict.AGAIN", "Verdict.UNKNOWN"),
    (MsgxIO, "_judge", "Verdict.UNKNOWN", "Verdict.REJECT"),
    (MsgxIO, "_judge", "Verdict.UNKNOWN", "Verdict.RETRY"),
    (MsgxIO, "_give_up", "self._sendmsg_x = None", "pass"),
    (MsgxIO, "_give_up", "self._recvmsg_x = None", "pass"),
    (MsgxIO, "_give_up", "log_once(name", "log_once(name + str(id(self))"),
    (MsgxIO, "_give_up", "log_once(name, ", "(lambda *_: None)("),
    (MsgxIO, "_all_valid", "min(sizes) > 0 and", ""),
    (MsgxIO, "_all_valid", " and max(sizes) <= self.caps.max_packet", ""),
    (DarwinDatagramIO, "_load", "headers.iovecs[W_BASE :", "headers.iovecs[IOVEC + W_BASE :"),
    (DarwinDatagramIO, "_load", "headers.words[W_DATALEN : STEP * count : STEP] = sizes", "pass"),
    (DarwinDatagramIO, "_load", "headers.iovecs[W_LEN : IOVEC * count : IOVEC] = sizes", "pass"),
    (DarwinDatagramIO, "_load", "map(len, items)", "map(len, reversed(items))"),
    (DarwinDatagramIO, "_write", "MSG_DONTWAIT", "0"),
    (DarwinDatagramIO, "_write", "return 0", "return 5"),
    (UtunIO, "_load", "at[item[0] >> 4]", "at[4]"),
    (UtunIO, "_load", "PREFIX + size", "size"),
    (UtunIO, "_load", "_words([PREFIX] * count)", "_words([PREFIX - 1] * count)"),
    (UtunIO, "_load", "iovecs[IOVEC + W_BASE", "iovecs[W_BASE"),
    (UtunIO, "_write", "(_PREFIXES[item[0] >> 4], item)", "(item,)"),
    (UtunIO, "_is_valid", " and item[0] >> 4 in _PREFIXES", ""),
    (UtunIO, "_all_valid", " and all(item[0] >> 4 in _PREFIXES for item in items)", ""),
    # Receiving
    (MsgxIO, "make_batch", "self.caps.max_packet + 1", "self.caps.max_packet"),
    (MsgxIO, "_headers_for", " or self._rx_for is not into", ""),
    (MsgxIO, "_headers_for", "into.capacity, ", ""),
    (MsgxIO, "_headers_for", "self.caps.max_rx, ", ""),
    (MsgxIO, "_take", "headers.restore()", "pass"),
    (MsgxIO, "_take", "headers.used = limit ", "headers.used = 0 "),
    (MsgxIO, "_take", "headers.used = min(count, limit)", "headers.used = min(count, limit) - 1"),
    (MsgxIO, "_take", "headers.used = min(count, limit)", "headers.used = limit"),
    (MsgxIO, "_take", "if error in _UNTOUCHED:", "if True:"),
    (MsgxIO, "_take", "if error in _UNTOUCHED:", "if False:"),
    (MsgxIO, "_take", "MSG_DONTWAIT", "0"),
    (MsgxIO, "_take", "if error in _RX_REFUSED", "if False"),
    (MsgxIO, "_take", 'self._give_up("recvmsg_x", describe(error))', "pass"),
    (MsgxIO, "_take", "return self._take_plainly(into)\n        return error", "return 11\n        return error"),
    (MsgxIO, "_take", "if not count:", "if False:"),
    (MsgxIO, "_take", "count > limit or", ""),
    (MsgxIO, "_take", "max(sizes) > self._room(into) or", ""),
    (MsgxIO, "_take", "max(sizes) > self._room(into) or", "max(sizes) >= self._room(into) or"),
    (MsgxIO, "_take", " or not self._sort_in(into, headers, sizes)", ""),
    (MsgxIO, "_take", "into.dropped = min(count, limit)", "pass"),
    (MsgxIO, "_take", "into.dropped = min(count, limit)", "into.dropped = count"),
    (MsgxIO, "_take", 'self._give_up("recvmsg_x", "it gave', 'str("it gave'),
    (Headers, "restore", "self.words[: STEP * self.used]", "self.words[: STEP * (self.used - 1)]"),
    (Headers, "__init__", "+ H_NAMELEN] = NAME", "+ H_NAMELEN] = 16"),
    (Headers, "__init__", "ctypes.addressof(room) + NAME_ROOM * i", "ctypes.addressof(room)"),
    (Headers, "__init__", "+ 8 * IOVEC * pieces * i", ""),
    (Headers, "__init__", "+ H_IOVLEN] = pieces", "+ H_IOVLEN] = 1 + i % 2"),
    (Headers, "__init__", "+ H_IOVLEN] = pieces", "+ H_IOVLEN] = 1"),
    (Headers, "sizes", "W_DATALEN :", "1 + W_DATALEN - 2 :"),
    (DarwinDatagramIO, "_aim", "into.address + i * into.slot", "into.address"),
    (DarwinDatagramIO, "_aim", "+ W_LEN] = into.slot", "+ W_LEN] = into.slot + 1"),
    (DarwinDatagramIO, "_aim", "+ W_LEN] = into.slot", "+ W_LEN] = into.slot - 1"),
    (DarwinDatagramIO, "_sort_in", "count(size) != count", "count(size) == 0"),
    (DarwinDatagramIO, "_sort_in", "if sender is None", "if False"),
    (DarwinDatagramIO, "_sort_in", "into.slot - 1", "into.slot"),
    (DarwinDatagramIO, "_sort_in", "min(self.caps.max_packet, into.slot - 1)", "self.caps.max_packet"),
    (DarwinDatagramIO, "_sort_in", "if min(sizes) > 0 and", "if"),
    (DarwinDatagramIO, "_sort_in", " and not any(flags)", ""),
    (DarwinDatagramIO, "_sort_in", "if 0 < sizes[i] <=", "if sizes[i] <="),
    (DarwinDatagramIO, "_sort_in", "MSG_TRUNC | MSG_CTRUNC", "MSG_TRUNC"),
    (DarwinDatagramIO, "_sort_in", "MSG_TRUNC | MSG_CTRUNC", "MSG_CTRUNC"),
    (DarwinDatagramIO, "_sort_in", "into.dropped += count - len(kept)", "pass"),
    (DarwinDatagramIO, "_sort_in", "senders = [senders[i] for i in kept]", "pass"),
    (DarwinDatagramIO, "_sender", " or peer.family != self._family", ""),
    (DarwinDatagramIO, "_sender", "self._senders[raw] = peer", "pass"),
    (DarwinDatagramIO, "_sender", " and ipaddress.ip_address(peer.host).is_link_local", ""),
    (DarwinDatagramIO, "_mark", "is senders[0]", "is not None"),
    (DarwinDatagramIO, "_mark", "self.caps.peers and", ""),
    (DarwinDatagramIO, "_take_plainly", "_name_length.value = NAME", "_name_length.value += 0"),
    (DarwinDatagramIO, "_take_plainly", "if not 0 < size <= limit", "if not 0 < size"),
    (DarwinDatagramIO, "_take_plainly", "if not 0 < size <= limit", "if not size <= limit"),
    (DarwinDatagramIO, "_take_plainly", "at * slot", "0"),
    (DarwinDatagramIO, "_take_plainly", "into.dropped += 1", "pass"),
    (DarwinDatagramIO, "_take_plainly", "return error", "return 0"),
    (UtunIO, "_aim", "into.address + i * into.slot", "into.address"),
    (UtunIO, "_aim", "kinds + PREFIX * i", "kinds"),
    (UtunIO, "_room", "PREFIX + into.slot", "into.slot"),
    (UtunIO, "_room", "PREFIX + into.slot", "2 * PREFIX + into.slot"),
    (UtunIO, "_sort_in", "if any(headers.name_sizes(count))", "if False"),
    (UtunIO, "_sort_in", "size - PREFIX, limit", "size, limit"),
    (UtunIO, "_sort_in", "room[: size - PREFIX]", "room[:size]"),
    (UtunIO, "_sort_in", "into.dropped += 1", "pass"),
    (UtunIO, "_sort_in", "if len(seen) == 1", "if seen"),
    (UtunIO, "_version", "0 < size <= limit", "size <= limit"),
    (UtunIO, "_version", "0 < size <= limit", "0 < size"),
    (UtunIO, "_version", "version if _VERSIONS.get(kind) == version else 0", "version"),
    (UtunIO, "_version", "version if _VERSIONS.get(kind) == version else 0", "_VERSIONS.get(kind, 0)"),
    (UtunIO, "_take_plainly", "room[: size - PREFIX]", "room[:size]"),
    (UtunIO, "_take_plainly", "return error", "return 0"),
    (UtunIO, "_take_plainly", "into.dropped += 1", "pass"),
    (UtunIO, "_take_plainly", "if len(seen) == 1", "if seen"),
]

#: Entries of the table of errors with another verdict.
TABLE = [
    (errno.EINTR, Verdict.REJECT),
    (errno.EAGAIN, Verdict.UNKNOWN),
    (errno.EAGAIN, Verdict.REJECT),
    (errno.ENOBUFS, Verdict.UNKNOWN),
    (errno.ENOBUFS, Verdict.BLOCKED),
    (errno.ENOBUFS, Verdict.RETRY),
    (errno.EIO, Verdict.RETRY),
    (errno.EPIPE, Verdict.REJECT),
    (errno.EINVAL, Verdict.REPEAT),
]


def cases() -> Iterator[tuple[Callable[..., Any], dict[str, Any], list[str]]]:
    """Every test of the modules with each of its parameters, and the fixtures it wants."""
    for module in MODULES:
        for name, test in vars(module).items():
            if not name.startswith("test_") or isinstance(test, ModuleType) or hasattr(test, "hypothesis"):
                continue
            axes = []
            for mark in getattr(test, "pytestmark", []):
                names, values = mark.args[:2]
                keys = [key.strip() for key in names.split(",")] if isinstance(names, str) else list(names)
                axes.append([dict(zip(keys, value if len(keys) > 1 else [value], strict=True)) for value in values])
            for choice in itertools.product(*axes):
                arguments = {key: value for part in choice for key, value in part.items()}
                wanted = [key for key in inspect.signature(test).parameters if key not in arguments]
                if set(wanted) <= {*MAKERS, "caplog"}:
                    yield test, arguments, wanted


CASES = list(cases())


def first_failure(log: pytest.LogCaptureFixture) -> str | None:
    """The name of the first test that fails."""
    for test, arguments, wanted in CASES:
        forget_what_was_logged()
        log.clear()
        try:
            with ExitStack() as stack:
                fixtures = {key: log if key == "caplog" else MAKERS[key](stack) for key in wanted}
                test(**arguments, **fixtures)
        except (Exception, pytest.fail.Exception):
            return test.__name__
    return None


def mutate(cls: type, name: str, old: str, new: str) -> Any:
    """The method with `new` where `old` stood."""
    source = textwrap.dedent(inspect.getsource(inspect.getattr_static(cls, name)))
    assert source.count(old) >= 1, f"{cls.__name__}.{name} has no {old!r}: the list of mutants is out of date"
    module = sys.modules[cls.__module__]
    # Inside a class, for `super()` to find one; its cell is then made to hold the class that is tested.
    scope: dict[str, Any] = {}
    exec(
        compile("class Mutated:\n" + textwrap.indent(source.replace(old, new), "    "), "<mutant>", "exec"),
        vars(module),
        scope,
    )
    method = vars(scope["Mutated"])[name]
    for cell in getattr(method, "__closure__", None) or ():
        if cell.cell_contents is scope["Mutated"]:
            cell.cell_contents = cls
    return method


def test_without_a_change_every_test_passes(caplog: pytest.LogCaptureFixture) -> None:
    assert len(CASES) > 200
    assert first_failure(caplog) is None


@pytest.mark.parametrize(
    "mutant", [pytest.param(m, id=f"{m[0].__name__}.{m[1]}: {m[2].strip()} -> {m[3].strip()}"[:90]) for m in MUTANTS]
)
def test_some_test_notices_the_change(
    mutant: Mutant, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cls, name, old, new = mutant
    monkeypatch.setattr(cls, name, mutate(cls, name, old, new))
    assert first_failure(caplog), "no test notices"


@pytest.mark.parametrize(("error", "verdict"), TABLE, ids=str)
def test_some_test_notices_another_verdict(
    error: int, verdict: Verdict, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(msgx, "SENDMSG_X", {**msgx.SENDMSG_X, error: verdict})
    assert first_failure(caplog), "no test notices"


def test_some_test_notices_a_layout_that_is_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, by in [
        ("W_NAME", 1),
        ("W_IOV", 1),
        ("W_DATALEN", -1),
        ("H_NAMELEN", 1),
        ("H_IOVLEN", 1),
        ("H_FLAGS", -1),
    ]:
        with monkeypatch.context() as patch:
            for module in (msgx, darwin, utun):
                if hasattr(module, name):
                    patch.setattr(module, name, getattr(module, name) + by)
            assert first_failure(caplog), f"no test notices that {name} is off"
