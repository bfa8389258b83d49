"""Who may talk to whom: CURVE keys, and the permissions of sockets that are files."""

import asyncio
import stat
from pathlib import Path

import pytest

from tests.wire.helpers import Asks, Number, closing, double, until
from wire import link
from wire.drops import Drop
from wire.outcomes import DeadlinePassed, InvalidRequest, NoHealthyNode
from wire.sockets import CurveKeys, FeedPublisher, FeedSubscriber, Requester, Responder, make_keys

ANYWHERE = "tcp://127.0.0.1:*"
LONG_S = 60.0


def keys(*, server_public: str = "", peers: tuple[str, ...] = ()) -> CurveKeys:
    return CurveKeys(*make_keys(), server_public=server_public, peers=peers)


def requester(endpoint: str, curve: CurveKeys | None) -> Requester[Asks, Number]:
    return Requester(endpoint, Asks, Number, curve=curve, patience_s=1.0)


async def test_an_allowed_key_is_served() -> None:
    server_public, server_secret = make_keys()
    ours = keys(server_public=server_public)
    server = Responder(
        ANYWHERE, Asks, Number, double, curve=CurveKeys(server_public, server_secret, peers=(ours.public,))
    )
    client = requester(server.endpoint, ours)
    with closing(client, server):
        assert (await client.request(Number(1), timeout_s=LONG_S)).value == 2


@pytest.mark.parametrize("intruder", ["unknown key", "wrong server key", "no key"])
async def test_anybody_else_gets_nothing_while_service_goes_on(intruder: str) -> None:
    server_public, server_secret = make_keys()
    ours = keys(server_public=server_public)
    theirs = {
        "unknown key": keys(server_public=server_public),
        "wrong server key": CurveKeys(ours.public, ours.secret, server_public=make_keys()[0]),
        "no key": None,
    }[intruder]
    served: list[Asks] = []
    server: Responder[Asks, Number] = Responder(
        ANYWHERE,
        Asks,
        Number,
        lambda ask, reply: (served.append(ask), reply(Number(0)))[0],
        curve=CurveKeys(server_public, server_secret, peers=(ours.public,)),
    )
    friend, foe = requester(server.endpoint, ours), requester(server.endpoint, theirs)
    with closing(friend, foe, server):
        with pytest.raises(NoHealthyNode, match="does not answer"):
            await foe.request(Number(666), timeout_s=LONG_S)
        await friend.request(Number(1), timeout_s=LONG_S)
        assert served == [Number(1)]
        if intruder == "unknown key":
            assert server.dropped[Drop.PEER_REFUSED] >= 1


async def test_without_peers_nobody_may_connect() -> None:
    server_public, server_secret = make_keys()
    server = Responder(ANYWHERE, Asks, Number, double, curve=CurveKeys(server_public, server_secret))
    client = requester(server.endpoint, keys(server_public=server_public))
    with closing(client, server), pytest.raises(NoHealthyNode):
        await client.request(Number(1), timeout_s=LONG_S)


async def test_a_requester_with_keys_does_not_talk_to_a_server_without() -> None:
    heard: list[Asks] = []
    server: Responder[Asks, Number] = Responder(ANYWHERE, Asks, Number, lambda ask, reply: heard.append(ask))
    client = requester(server.endpoint, keys(server_public=make_keys()[0]))
    with closing(client, server):
        with pytest.raises(NoHealthyNode):
            await client.request(Number(1), timeout_s=LONG_S)
        assert client.send(Number(2)) is False
        assert heard == []


async def test_a_key_that_is_allowed_later_is_let_in_without_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_REDIAL_S", 0.2)
    server_public, server_secret = make_keys()
    ours = keys(server_public=server_public)
    strict = Responder(ANYWHERE, Asks, Number, double, curve=CurveKeys(server_public, server_secret))
    client: Requester[Asks, Number] = Requester(strict.endpoint, Asks, Number, curve=ours, patience_s=LONG_S)
    with closing(client):
        await until(lambda: client.dropped[Drop.PEER_REFUSED] > 2)
        strict.close()
        open_to_us = CurveKeys(server_public, server_secret, peers=(ours.public,))
        server = Responder(strict.endpoint, Asks, Number, double, curve=open_to_us)
        with closing(server):
            assert (await client.request(Number(4), timeout_s=LONG_S)).value == 8


async def test_a_key_that_is_not_allowed_any_more_is_not_heard_though_it_is_connected() -> None:
    server_public, server_secret = make_keys()
    leaves, stays = keys(server_public=server_public), keys(server_public=server_public)
    curve = CurveKeys(server_public, server_secret, peers=(leaves.public, stays.public))
    server = Responder(ANYWHERE, Asks, Number, double, curve=curve)
    leaving, staying = requester(server.endpoint, leaves), requester(server.endpoint, stays)
    with closing(leaving, staying, server):
        for client in (leaving, staying):
            assert (await client.request(Number(1), timeout_s=LONG_S)).value == 2
        server.allow([stays.public])
        with pytest.raises(DeadlinePassed):
            await leaving.request(Number(1), timeout_s=0.5)
        assert server.dropped == {Drop.PEER_REFUSED: 1}
        assert (await staying.request(Number(2), timeout_s=LONG_S)).value == 4
        server.allow([leaves.public])
        assert (await leaving.request(Number(3), timeout_s=LONG_S)).value == 6


async def test_feeds_are_for_allowed_keys_too() -> None:
    server_public, server_secret = make_keys()
    ours, theirs = keys(server_public=server_public), keys(server_public=server_public)
    publisher: FeedPublisher[Number] = FeedPublisher(
        ANYWHERE,
        Number,
        epoch=1,
        heartbeat_s=0.02,
        curve=CurveKeys(server_public, server_secret, peers=(ours.public,)),
    )
    heard: dict[str, list[int]] = {"friend": [], "foe": []}
    friend, foe = (
        FeedSubscriber(
            publisher.endpoint,
            Number,
            on_message=lambda number, message, who=who: heard[who].append(message.value),
            on_gap=lambda expected, got: None,
            curve=curve,
        )
        for who, curve in (("friend", ours), ("foe", theirs))
    )
    with closing(friend, foe, publisher):
        await until(lambda: not friend.silent and publisher.dropped[Drop.PEER_REFUSED] > 0)
        publisher.publish(Number(1))
        await until(lambda: heard["friend"] == [1])
        await asyncio.sleep(0.1)
        assert heard["foe"] == []
        assert foe.silent


@pytest.mark.parametrize("bad", ["", "short", "x" * 39, "é" * 40, "\x00" * 40, "#" * 40 + "#", "~" * 40, "#" * 40])
async def test_a_key_that_is_none_is_named_and_not_shown(bad: str) -> None:
    public, secret = make_keys()
    with pytest.raises(InvalidRequest, match=r"curve\.secret is not a CURVE key") as caught:
        Responder(ANYWHERE, Asks, Number, double, curve=CurveKeys(public, bad))
    assert caught.value.field == "curve.secret"
    assert not bad or bad not in str(caught.value)
    with pytest.raises(InvalidRequest, match=r"curve\.peers"):
        Responder(ANYWHERE, Asks, Number, double, curve=CurveKeys(public, secret, peers=(bad,)))
    with pytest.raises(InvalidRequest, match=r"curve\.server_public"):
        requester("tcp://127.0.0.1:1", CurveKeys(public, secret, server_public=bad))


async def test_socket_files_are_private(endpoint: str, folder: Path) -> None:
    with closing(Responder(endpoint, Asks, Number, double)):
        socket_file = folder / "sockets" / "node.sock"
        assert stat.S_IMODE(socket_file.stat().st_mode) == 0o600
        assert stat.S_IMODE(socket_file.parent.stat().st_mode) == 0o700


async def test_two_servers_never_share_an_endpoint(endpoint: str) -> None:
    first = Responder(endpoint, Asks, Number, double)
    client = requester(endpoint, None)
    with closing(client):
        with pytest.raises(InvalidRequest, match="another process serves"):
            Responder(endpoint, Asks, Number, double)
        assert (await client.request(Number(1), timeout_s=LONG_S)).value == 2
        first.close()
        with closing(Responder(endpoint, Asks, Number, double)):
            pass
