"""One link with someone in the middle."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from cryptography.exceptions import InvalidTag

from lipdp_lightning.studies.parties.secure_aggregation import TamperedMessage
from lipdp_lightning.studies.parties.transport import (
    DATA,
    LARGEST_FRAME,
    RECEIVED,
    Identity,
    Link,
    LinkClosed,
    answer,
    call,
    new_identities,
    read_exactly,
)

SESSION = b"session"


@dataclass
class Relay:
    """Two ends, and the sockets between them that the one in the middle reads and writes."""

    caller: Link
    called: Link
    from_caller: socket.socket
    to_called: socket.socket

    def next_frame(self) -> bytes:
        header = read_exactly(self.from_caller, 5, "caller")
        return header + read_exactly(self.from_caller, int.from_bytes(header[:4], "big"), "caller")


def connect(
    caller: Identity, called: Identity, sessions: tuple[bytes, bytes] = (SESSION, SESSION)
) -> tuple[dict[str, object], list[socket.socket]]:
    """Both handshakes, their four messages carried over; what each side ended with."""
    a, middle_a = socket.socketpair()
    b, middle_b = socket.socketpair()
    for end in (a, middle_a, b, middle_b):
        end.settimeout(2)
    ended: dict[str, object] = {}

    def side(name: str, work) -> None:
        try:
            ended[name] = work()
        except (TamperedMessage, LinkClosed) as error:
            ended[name] = error

    threads = [
        threading.Thread(target=side, args=("caller", lambda: call(a, caller, "server 0", sessions[0]))),
        threading.Thread(target=side, args=("called", lambda: answer(b, called, sessions[1]))),
    ]
    for thread in threads:
        thread.start()
    steps = ((middle_a, middle_b, 38), (middle_b, middle_a, 32), (middle_a, middle_b, 21), (middle_b, middle_a, 21))
    for source, target, size in steps:
        try:
            target.sendall(read_exactly(source, size, "an end"))
        except (LinkClosed, OSError):
            middle_a.close()
            middle_b.close()
            break
    for thread in threads:
        thread.join()
    return ended, [middle_a, middle_b]


@pytest.fixture
def relay() -> Iterator[Relay]:
    identities = new_identities(["party 0", "server 0"])
    ended, middle = connect(identities["party 0"], identities["server 0"])
    caller, called = ended["caller"], ended["called"]
    assert isinstance(caller, Link) and isinstance(called, Link)
    yield Relay(caller, called, *middle)
    caller.close()
    called.close()
    for end in middle:
        end.close()


def test_messages_arrive_and_are_counted(relay: Relay) -> None:
    assert relay.called.peer == "party 0"
    for payload in (b"", b"first", b"x" * 1000):
        relay.caller.send(DATA, payload)
        relay.to_called.sendall(relay.next_frame())
        assert relay.called.receive(DATA) == (DATA, payload)
    assert relay.caller.sent == relay.called.received
    assert (relay.caller.sent.messages, relay.caller.sent.payload, relay.caller.sent.framing) == (3, 1005, 63)
    assert (relay.caller.sent.handshake, relay.called.sent.handshake) == (59, 53)


def test_the_text_is_not_in_the_frame_and_equal_texts_differ(relay: Relay) -> None:
    frames = []
    for _ in range(2):
        relay.caller.send(DATA, b"a secret of twenty..")
        frames.append(relay.next_frame())
    assert b"secret" not in frames[0] and frames[0][5:] != frames[1][5:]


@pytest.mark.parametrize("position", [0, 3, 4, 5, 20, -1])
def test_a_changed_byte(relay: Relay, position: int) -> None:
    relay.caller.send(DATA, b"twenty bytes of text")
    frame = bytearray(relay.next_frame())
    frame[position] ^= 0x01
    relay.to_called.sendall(bytes(frame) + bytes(300))
    relay.to_called.shutdown(socket.SHUT_WR)
    with pytest.raises((TamperedMessage, LinkClosed)) as caught:
        relay.called.receive(DATA)
    if position not in (0, 3):  # another length may also end as a frame that never comes
        assert caught.type is TamperedMessage


def test_every_bit_of_a_frame(relay: Relay) -> None:
    """The cipher text alone, without a new handshake per bit: a wrong bit leaves the counter where it is."""
    relay.caller.send(DATA, b"ab")
    frame = relay.next_frame()
    opened = relay.called._receive
    nonce = relay.called._received_frames.to_bytes(12, "big")
    assert opened.decrypt(nonce, frame[5:], frame[:5]) == b"ab"
    for bit in range(8 * len(frame)):
        changed = bytearray(frame)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(InvalidTag):
            opened.decrypt(nonce, bytes(changed[5:]), bytes(changed[:5]))


def test_replay(relay: Relay) -> None:
    relay.caller.send(DATA, b"once")
    frame = relay.next_frame()
    relay.to_called.sendall(frame + frame)
    assert relay.called.receive(DATA)[1] == b"once"
    with pytest.raises(TamperedMessage, match="replayed"):
        relay.called.receive(DATA)


def test_reordering_and_dropping(relay: Relay) -> None:
    for payload in (b"one", b"two"):
        relay.caller.send(DATA, payload)
    relay.next_frame()
    relay.to_called.sendall(relay.next_frame())
    with pytest.raises(TamperedMessage):
        relay.called.receive(DATA)


def test_reflection(relay: Relay) -> None:
    relay.caller.send(DATA, b"to the server")
    relay.from_caller.sendall(relay.next_frame())
    with pytest.raises(TamperedMessage):
        relay.caller.receive(DATA)


def test_truncation(relay: Relay) -> None:
    relay.caller.send(DATA, b"a message that is cut")
    relay.to_called.sendall(relay.next_frame()[:-1])
    relay.to_called.shutdown(socket.SHUT_WR)
    with pytest.raises(LinkClosed):
        relay.called.receive(DATA)


def test_silence_ends(relay: Relay) -> None:
    relay.called._connection.settimeout(0.05)
    with pytest.raises(LinkClosed):
        relay.called.receive(DATA)


def test_a_kind_that_is_not_due(relay: Relay) -> None:
    relay.caller.send(DATA, b"")
    relay.to_called.sendall(relay.next_frame())
    with pytest.raises(TamperedMessage, match="kind"):
        relay.called.receive(RECEIVED)


def test_a_huge_frame_is_not_read(relay: Relay) -> None:
    relay.to_called.sendall((LARGEST_FRAME + 1).to_bytes(4, "big") + b"\x01")
    with pytest.raises(TamperedMessage, match="announced"):
        relay.called.receive(DATA)


def test_identities_are_checked_on_both_sides() -> None:
    right = new_identities(["party 0", "party 1", "server 0"])
    wrong = new_identities(["party 0", "party 1", "server 0"])
    party, server = right["party 0"], right["server 0"]
    forged_party = replace(party, private=wrong["party 0"].private)
    forged_server = replace(server, private=wrong["server 0"].private)
    other_name = replace(right["party 1"], name="party 0")
    for caller, called in ((forged_party, server), (party, forged_server), (other_name, server)):
        ended, middle = connect(caller, called)
        assert isinstance(ended["caller"], Exception) and isinstance(ended["called"], Exception)
        for end in middle:
            end.close()


def test_another_session_and_a_stranger_are_turned_away() -> None:
    identities = new_identities(["party 0", "server 0"])
    ended, _ = connect(identities["party 0"], identities["server 0"], (SESSION, b"another"))
    assert isinstance(ended["called"], TamperedMessage)
    known = identities["server 0"].public
    stranger = new_identities(["party 7"])["party 7"]
    ended, _ = connect(replace(stranger, public={**known, **stranger.public}), identities["server 0"])
    assert isinstance(ended["called"], TamperedMessage)


def test_a_recorded_handshake_does_not_open_a_second_link() -> None:
    identities = new_identities(["party 0", "server 0"])
    a, middle = socket.socketpair()
    b, called_side = socket.socketpair()
    for end in (a, middle, b, called_side):
        end.settimeout(2)

    def first() -> None:
        answer(called_side, identities["server 0"], SESSION)

    thread = threading.Thread(target=first)
    thread.start()
    caller = threading.Thread(target=lambda: call(a, identities["party 0"], "server 0", SESSION))
    caller.start()
    hello = read_exactly(middle, 38, "caller")
    b.sendall(hello)
    middle.sendall(read_exactly(b, 32, "called"))
    confirmation = read_exactly(middle, 21, "caller")
    b.sendall(confirmation)
    middle.sendall(read_exactly(b, 21, "called"))
    thread.join()
    caller.join()
    again, second_side = socket.socketpair()
    second_side.settimeout(2)
    again.sendall(hello + confirmation)
    with pytest.raises(TamperedMessage):
        answer(second_side, identities["server 0"], SESSION)
    for end in (a, middle, b, called_side, again, second_side):
        end.close()
