"""Requests and responses against the vectors, both roles.  Protocol 03, section 15."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from rnsfast.crypto.hashes import truncated
from rnsfast.crypto.token import TokenKey
from rnsfast.engine.link import Link
from rnsfast.engine.linkstate import State
from rnsfast.engine.requests import (
    PENDING_LIMIT,
    PendingRequest,
    Policy,
    RequestArrived,
    RequestHandler,
    RequestStatus,
    ask,
    respond,
)
from rnsfast.errors import MessageTooLarge
from rnsfast.wire.drop import Drop
from rnsfast.wire.packet import (
    CTX_REQUEST,
    CTX_RESOURCE_ADV,
    CTX_RESOURCE_RCL,
    CTX_RESPONSE,
    packet_hash,
)
from rnsfast.wire.requests import (
    FLAG_METADATA,
    FLAG_REQUEST,
    FLAG_RESPONSE,
    Request,
    Response,
    build_request,
    build_response,
    parse_request,
    parse_response,
    path_hash,
    resource_request_id,
    response_size,
)
from tests.engine.support import NOW, make_link, sealed, sent, some_identity
from tests.vectors_support import Case, by_name, unhex, vectors
from tests.virtualnet import VirtualNet

GROUP = vectors("link", "requests")
KEY, LINK_ID = unhex(GROUP["derived_key"]), unhex(GROUP["link_id"])
CASES = {case["name"]: case for case in GROUP["cases"]}
EXCHANGES = [case for case in GROUP["cases"] if isinstance(case.get("request"), dict)]
AS_RESOURCE = [case for case in EXCHANGES if case.get("advertisement")]


def end(initiator: bool, **options: Any) -> Any:
    return make_link(initiator=initiator, key=KEY, link_id=LINK_ID, rtt=GROUP["rtt"], **options)


def opened(raw: bytes) -> bytes:
    plain = TokenKey(KEY).open(raw[19:])
    assert plain is not None
    return plain


def asked_side(case: Case) -> tuple[Link, Any, list[RequestArrived]]:
    """The end that serves, prepared as the reference's was."""
    link, _, port = end(initiator=case["request"]["dir"] == "r2i")
    arrived: list[RequestArrived] = []
    handlers = link.destination.requests
    policy, allowed = Policy.ALL, ()
    if case["path"] == "/private":
        policy = Policy.NONE
    if case["path"] == "/list":
        policy, allowed = Policy.LIST, (some_identity(3).hash,)
        if case["name"] == "allow_list_identified":
            link.remote_identity = some_identity(3)
    if case["path"] != "/unknown":
        handlers.register(RequestHandler(case["path"], arrived.append, policy, allowed))
    if case["path"] == "/limit":
        handlers.max_size = 64
    return link, port, arrived


@pytest.mark.parametrize("case", EXCHANGES, ids=by_name)
def test_packed_forms(case: Case) -> None:
    plain = unhex(case["request"]["plaintext"])
    assert path_hash(case["path"]).hex() == case["path_hash"]
    request = parse_request(plain)
    assert isinstance(request, Request)
    assert (request.requested_at, request.path_hash.hex()) == (case["requested_at"], case["path_hash"])
    assert msgpack.packb(request.data).hex() == case["data_msgpack"]
    assert build_request(request.requested_at, request.path_hash, request.data) == plain
    assert packet_hash(unhex(case["request"]["raw"])).hex()[:32] == case["request_id"]
    if case["response"] and not case.get("advertisement"):
        answer = unhex(case["response"]["plaintext"])
        response = parse_response(answer)
        assert isinstance(response, Response) and response.request_id.hex() == case["request_id"]
        assert msgpack.packb(response.value).hex() == case["response_value_msgpack"]
        assert build_response(response.request_id, response.value) == answer
        assert response_size(response.value) == case["response_size"]


@pytest.mark.parametrize("case", EXCHANGES, ids=by_name)
def test_serving(case: Case) -> None:
    link, port, arrived = asked_side(case)
    raw = unhex(case["request"]["raw"])
    link.engine.receive(port, [raw, raw], NOW + 1)  # the copy is filtered
    assert len(arrived) == len(case["handler_calls"])
    if not arrived:
        assert not sent(port)
        return
    (request,), (call,) = arrived, case["handler_calls"]
    assert (request.handler.path, request.request_id.hex()) == (call["path"], call["request_id"])
    assert request.requested_at == call["requested_at"] and msgpack.packb(request.data).hex() == call["data_msgpack"]
    assert link.link_id.hex() == call["link_id"]
    assert (request.remote_identity is None) == (call["remote_identity"] is None) or case["name"] == "file_response"
    if case.get("resource_content") and not case["advertisement"]["f"] & FLAG_METADATA:
        content = parse_response(unhex(case["resource_content"]))
        assert isinstance(content, Response) and case["advertisement"]["f"] & FLAG_RESPONSE
        assert len(unhex(case["resource_content"])) == case["advertisement"]["d"] > link.mdu
        with pytest.raises(MessageTooLarge):  # there are no resources yet, and this says so
            respond(request, content.value, NOW + 1)
        assert not sent(port)
    elif case["response"] is None or case.get("advertisement"):
        assert not respond(request, None, NOW + 1) and not sent(port)
    else:
        value = msgpack.unpackb(unhex(case["response_value_msgpack"]))
        assert respond(request, value, NOW + 1)
        (answer,) = sent(port)
        assert (answer[18], len(answer)) == (CTX_RESPONSE, case["response"]["size"])
        assert opened(answer) == unhex(case["response"]["plaintext"])


def pending_for(link: Link, request_id: str, **options: Any) -> PendingRequest:
    """Our own request has another IV, hence another id: the vector's is laid in."""
    pending = PendingRequest(link, unhex(request_id), 0, NOW, 11.0, options.get("max_response_size"))
    link.pending_requests[pending.request_id] = pending
    link.engine.timers.arm(pending, NOW + 11.0)
    return pending


@pytest.mark.parametrize("case", EXCHANGES, ids=by_name)
def test_asking(case: Case) -> None:
    link, _, port = end(initiator=case["request"]["dir"] == "i2r")
    link.rtt = (case["timeout"] - 11.25) / 6  # the responder's is another
    link.engine.unix_offset = case["requested_at"] - NOW
    data = msgpack.unpackb(unhex(case["data_msgpack"]))
    pending = ask(link, case["path"], data, NOW)
    assert pending is not None and pending.timeout == pytest.approx(case["timeout"])
    (raw,) = sent(port)
    assert (raw[18], len(raw), packet_hash(raw)[:16]) == (CTX_REQUEST, case["request"]["size"], pending.request_id)
    mine, theirs = parse_request(opened(raw)), parse_request(unhex(case["request"]["plaintext"]))
    assert isinstance(mine, Request) and isinstance(theirs, Request)
    assert (mine.path_hash, mine.data) == (theirs.path_hash, theirs.data)
    assert mine.requested_at == pytest.approx(theirs.requested_at, abs=1e-5)

    waiting = pending_for(link, case["request_id"])
    if case["response"]:
        answer = unhex(case["response"]["raw"])
        link.engine.receive(port, [answer], NOW + 1)
        if case.get("advertisement"):
            assert waiting.status is RequestStatus.FAILED and "more than one packet" in str(waiting.why)
            (refusal,) = sent(port)
            assert refusal[18] == CTX_RESOURCE_RCL and opened(refusal).hex() == case["advertisement"]["h"]
        else:
            assert waiting.status == case["receipt_status"] and waiting.response_size == case["response_size"]
            assert msgpack.packb(waiting.response).hex() == case["response_value_msgpack"]
            assert waiting.concluded_at == NOW + 1 and waiting.request_id not in link.pending_requests
    else:
        link.engine.run_timers(NOW + 10.9)
        assert waiting.status == case["receipt_status"] == RequestStatus.SENT
        link.engine.run_timers(NOW + 12)
        assert waiting.status is RequestStatus.FAILED and not link.pending_requests


def test_a_request_larger_than_a_packet_is_one_for_a_resource() -> None:
    case = CASES["request_as_resource"]
    packed = unhex(case["packed_request"])
    request = parse_request(packed)
    assert isinstance(request, Request) and resource_request_id(packed).hex() == case["request_id"]
    assert case["advertisement"]["f"] & FLAG_REQUEST and case["advertisement"]["d"] == len(packed) == 432
    link, _, port = end(initiator=True)
    with pytest.raises(MessageTooLarge):
        ask(link, case["path"], request.data, NOW)
    assert not sent(port) and not link.pending_requests
    fits = ask(link, case["path"], request.data[:-1], NOW)
    assert fits is not None and fits.request_size == 431 == link.mdu


def test_a_request_as_a_resource_is_refused_if_there_are_handlers() -> None:
    case = CASES["request_resource_over_max_request_size"]
    for handlers in (True, False):
        link, _, port = end(initiator=False)
        if handlers:
            link.destination.requests.register(RequestHandler("/big", lambda r: None, Policy.ALL))
        link.engine.receive(port, [unhex(case["advertisement_packet"])], NOW + 1)
        answers = sent(port)
        if handlers:
            assert [opened(a).hex() for a in answers] == [case["answer"]["plaintext"]]
            assert (answers[0][18], len(answers[0])) == (CTX_RESOURCE_RCL, case["answer"]["size"])
        else:
            assert not answers
        assert link.state is State.ACTIVE


def test_limits_of_responses() -> None:
    case = CASES["max_response_size_packet"]
    for row in case["results"]:
        link, _, port = end(initiator=True)
        pending = pending_for(link, "11" * 16, max_response_size=row["max_response_size"])
        plain = build_response(bytes([0x11]) * 16, bytes(case["response_value_bytes"]))
        link.engine.receive(port, [sealed(CTX_RESPONSE, plain, bytes(16), LINK_ID, KEY)], NOW + 1)
        assert pending.status == row["status"] and (pending.response is None) == (row["status"] == 0)
    case = CASES["max_response_size_resource"]
    link, _, port = end(initiator=True)
    pending = pending_for(link, case["advertisement"]["q"], max_response_size=case["max_response_size"])
    link.engine.receive(port, [unhex(case["advertisement_packet"]["raw"])], NOW + 1)
    (answer,) = sent(port)
    assert pending.status == case["status"] and opened(answer).hex() == case["answer"]["plaintext"]


def test_a_second_response_changes_nothing() -> None:
    assert CASES["duplicate_response"]["callbacks"] == ["again"]
    link, _, port = end(initiator=True)
    pending = pending_for(link, "11" * 16)
    for n, answer in enumerate((b"again", b"other")):
        plain = build_response(bytes([0x11]) * 16, answer)
        link.engine.receive(port, [sealed(CTX_RESPONSE, plain, n.to_bytes(16, "big"), LINK_ID, KEY)], NOW + 1 + n)
    assert (pending.status, pending.response, pending.concluded_at) == (RequestStatus.READY, b"again", NOW + 1)
    assert port.drops[Drop.RESPONSE_UNEXPECTED] == 1
    late = pending_for(link, "22" * 16)
    link.engine.run_timers(NOW + 20)
    plain = build_response(bytes([0x22]) * 16, b"late")
    link.engine.receive(port, [sealed(CTX_RESPONSE, plain, b"3" * 16, LINK_ID, KEY)], NOW + 21)
    assert late.status is RequestStatus.FAILED and late.response is None


def test_every_case_of_the_vectors_is_used() -> None:
    used = {case["name"] for case in EXCHANGES} | {
        "request_as_resource", "request_resource_over_max_request_size", "max_response_size_packet",
        "max_response_size_resource", "duplicate_response",
    }  # fmt: skip
    assert used == set(CASES) and len(CASES) == 22
    assert [case["name"] for case in AS_RESOURCE] == ["response_as_resource", "file_response"]


def test_unreadable_requests_and_responses_are_counted_and_harmless() -> None:
    rubbish = [b"", b"\xc1", b"\x93", b"\x90", b"\xc0", b"\x92\x01\x02", b"\x93\xc0\xc0\xc0", b"\xdd\xff\xff\xff\xff",
               b"\x91" * 400, b"\xa2\xff\xff", b"\x81\x90\x01", b"\x93\xcb" + bytes(8) + b"\xc4\x03abc\x01",
               b"\xc7\x04\xff\xff\xff\xff\xff", b"\xd6\xff" + bytes(4)]  # fmt: skip
    link, _, port = end(initiator=False)
    link.destination.requests.register(RequestHandler("/x", lambda r: None, Policy.ALL))
    for n, plain in enumerate(rubbish):
        for context in (CTX_REQUEST, CTX_RESPONSE):
            iv = (n * 256 + context).to_bytes(16, "big")
            link.engine.receive(port, [sealed(context, plain, iv, LINK_ID, KEY)], NOW + 1)
    assert port.drops[Drop.REQUEST_UNREADABLE] == port.drops[Drop.RESPONSE_UNREADABLE] == len(rubbish)
    trailing = build_request(1.0, path_hash("/y"), None) + b"more"
    link.engine.receive(port, [sealed(CTX_REQUEST, trailing, b"t" * 16, LINK_ID, KEY)], NOW + 1)
    assert port.drops[Drop.REQUEST_NO_HANDLER] == 1  # bytes behind the object are ignored (trap T17)
    link.engine.receive(port, [sealed(CTX_RESOURCE_ADV, b"\x80more", b"a" * 16, LINK_ID, KEY)], NOW + 1)
    assert link.state is State.ACTIVE


def test_requests_both_ways_over_a_network() -> None:
    net = VirtualNet(seed=8)
    link, peer, _, _ = net.linked()

    def serve(request: RequestArrived) -> None:
        respond(request, [request.data, "from", request.handler.path], net.now)

    for end_ in (link, peer):
        end_.destination.requests.register(RequestHandler("/echo", serve, Policy.ALL))
    asked = [ask(link, "/echo", {"n": 1}, net.now), ask(peer, "/echo", b"\x00", net.now)]
    net.run(1)
    assert [p.response for p in asked if p] == [[{"n": 1}, "from", "/echo"], [b"\x00", "from", "/echo"]]
    unknown = ask(link, "/nowhere", None, net.now)
    closing = ask(link, "/nowhere", None, net.now, timeout=1000)
    net.run(12)
    assert unknown and unknown.status is RequestStatus.FAILED and "no response within 11" in str(unknown.why)
    assert closing and closing.status is RequestStatus.SENT
    peer.close(net.now)
    net.run(1)
    assert closing.status is RequestStatus.FAILED and closing.why == link.closing
    assert ask(link, "/echo", None, net.now) is None


def test_pending_requests_are_bounded() -> None:
    link, _, port = end(initiator=True)
    for _ in range(PENDING_LIMIT):
        assert ask(link, "/x", None, NOW) is not None
    assert ask(link, "/x", None, NOW) is None
    assert len(sent(port)) == PENDING_LIMIT
    link.engine.run_timers(NOW + 60)
    assert not link.pending_requests and truncated(b"") and ask(link, "/x", None, NOW + 60) is not None


def test_handlers_say_what_is_wrong_with_them() -> None:
    with pytest.raises(ValueError, match="path"):
        RequestHandler("", print)
    with pytest.raises(ValueError, match="7"):
        RequestHandler("/x", print, 7)  # type: ignore[arg-type]
    link, _, _ = end(initiator=False)
    handlers = link.destination.requests
    handlers.register(RequestHandler("/x", print))
    again = RequestHandler("/x", print)
    handlers.register(again)
    assert list(handlers.by_hash.values()) == [again]
    assert handlers.deregister("/x") and not handlers.deregister("/x")
