"""Provides one authenticated, encrypted, ordered link between two processes over a loopback socket.

Handshake: both sides hold an X25519 identity, and know the other's public identity beforehand. They exchange ephemeral
X25519 keys, and derive one ChaCha20-Poly1305 key per direction by HKDF-SHA256 from the four Diffie-Hellman values
(ephemeral-ephemeral, ephemeral-static both ways, static-static) with the transcript and the session's name as salt.
Only the holders of both identities get the keys, and recorded links stay secret if an identity leaks later. Each side's
first frame is empty and proves that it has them.

Frames: length (4 bytes), kind (1), cipher text with tag. The nonce is the number of the frame in its direction, not
sent; length and kind are authenticated. A changed, replayed, reordered, dropped or truncated frame does not verify. A
link that failed once is closed: nothing after a forged frame is read.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from lipdp_lightning.studies.parties.costs import HEADER_BYTES, TAG_BYTES, LinkCount
from lipdp_lightning.studies.parties.secure_aggregation import ProtocolError, TamperedMessage

HOST = "127.0.0.1"
LARGEST_FRAME = 1 << 26
_VERSION = b"\x01"
_KEY_BYTES = 32
CONFIRM, DATA, RECEIVED, SEAL, STATUS, OPEN, ANSWER, REFUSED, END = range(9)


class LinkClosed(ProtocolError):
    """The other side disappeared, or was silent for too long."""


@dataclass(frozen=True)
class Identity:
    """A process's own long-term key, and everyone's public keys by name."""

    name: str
    private: bytes = field(repr=False)
    public: Mapping[str, bytes]


def new_identities(names: list[str]) -> dict[str, Identity]:
    """Returns fresh identities that know each other, in place of the enrolment of parties and servers."""
    private = {name: X25519PrivateKey.generate() for name in names}
    public = {name: key.public_key().public_bytes_raw() for name, key in private.items()}
    return {name: Identity(name, key.private_bytes_raw(), public) for name, key in private.items()}


class Link:
    """One side of an established link."""

    def __init__(self, connection: socket.socket, peer: str, send_key: bytes, receive_key: bytes) -> None:
        self.peer = peer
        self.sent, self.received = LinkCount(), LinkCount()
        self._connection = connection
        self._send, self._receive = ChaCha20Poly1305(send_key), ChaCha20Poly1305(receive_key)
        self._sent_frames = self._received_frames = 0

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, kind: int, payload: bytes = b"") -> None:
        header = (len(payload) + TAG_BYTES).to_bytes(4, "big") + bytes([kind])
        nonce = self._sent_frames.to_bytes(12, "big")
        self._sent_frames += 1
        try:
            self._connection.sendall(header + self._send.encrypt(nonce, payload, header))
        except OSError as error:
            raise LinkClosed(f"{self.peer} is gone: {error}.") from error
        if kind == CONFIRM:
            self.sent.handshake += HEADER_BYTES + TAG_BYTES
        else:
            self.sent.frames(1, len(payload))

    def wait_at_most(self, seconds: float) -> None:
        """Sets how long each header and each payload may take to arrive from now on."""
        self._connection.settimeout(seconds)

    def receive(self, *expected: int, most: int = LARGEST_FRAME - TAG_BYTES) -> tuple[int, bytes]:
        """Returns the next frame's kind and payload; the kind must be among those expected, and the payload at most so
        long.
        """
        header = read_exactly(self._connection, HEADER_BYTES, self.peer)
        size, kind = int.from_bytes(header[:4], "big"), header[4]
        if not TAG_BYTES <= size <= most + TAG_BYTES:
            self.close()
            raise TamperedMessage(f"{self.peer} announced a frame of {size} bytes: not one of this protocol.")
        sealed = read_exactly(self._connection, size, self.peer)
        nonce = self._received_frames.to_bytes(12, "big")
        try:
            payload = self._receive.decrypt(nonce, sealed, header)
        except InvalidTag:
            self.close()
            raise TamperedMessage(
                f"frame {self._received_frames} from {self.peer} does not verify: it was changed, replayed, reordered, "
                "or made with another key."
            ) from None
        self._received_frames += 1
        if kind not in expected:
            self.close()
            raise TamperedMessage(f"{self.peer} sent a frame of kind {kind} where {expected} was due.")
        if kind == CONFIRM:
            self.received.handshake += HEADER_BYTES + TAG_BYTES
        else:
            self.received.frames(1, len(payload))
        return kind, payload

    def close(self) -> None:
        self._connection.close()


def read_exactly(connection: socket.socket, size: int, peer: str) -> bytes:
    """Returns that many bytes, within the connection's time-out; a link that ends before raises LinkClosed."""
    patience, parts = connection.gettimeout(), bytearray()
    deadline = None if patience is None else time.monotonic() + patience
    try:
        while len(parts) < size:
            if deadline is not None and parts:  # otherwise every single byte would restart the time-out
                connection.settimeout(max(1e-3, deadline - time.monotonic()))
            part = connection.recv(min(size - len(parts), 1 << 16))
            if not part:
                raise LinkClosed(f"{peer} closed the link in the middle of a message, or before one.")
            parts += part
            if deadline is not None and len(parts) < size and time.monotonic() > deadline:
                raise LinkClosed(f"{peer} is too slow.")
        connection.settimeout(patience)
    except OSError as error:  # this includes a time-out
        raise LinkClosed(f"{peer} is silent or gone: {error}.") from error
    return bytes(parts)


def _name_bytes(name: str) -> bytes:
    """Returns 'party 7' as one letter and a number of 4 bytes."""
    role, _, number = name.partition(" ")
    return role[:1].encode() + int(number or 0).to_bytes(4, "big")


def _derive(
    identity: Identity, ephemeral: X25519PrivateKey, peer: str, peer_ephemeral: bytes, context: bytes, calling: bool
) -> tuple[bytes, bytes]:
    static = X25519PrivateKey.from_private_bytes(identity.private)
    other, other_ephemeral = (X25519PublicKey.from_public_bytes(key) for key in (identity.public[peer], peer_ephemeral))
    mixed = static.exchange(other_ephemeral), ephemeral.exchange(other)
    values = (ephemeral.exchange(other_ephemeral), *(mixed if calling else mixed[::-1]), static.exchange(other))
    digest = hashes.Hash(hashes.SHA256())
    digest.update(context)
    derived = HKDF(hashes.SHA256(), 2 * _KEY_BYTES, salt=digest.finalize(), info=b"lipdp curves link").derive(
        b"".join(values)
    )
    return derived[:_KEY_BYTES], derived[_KEY_BYTES:]


def _context(session: bytes, hello: bytes, reply: bytes, caller: bytes, callee: bytes) -> bytes:
    return len(session).to_bytes(4, "big") + session + hello + reply + caller + callee


def call(connection: socket.socket, identity: Identity, peer: str, session: bytes) -> Link:
    """Makes the calling side's handshake with a server."""
    ephemeral = X25519PrivateKey.generate()
    hello = _VERSION + _name_bytes(identity.name) + ephemeral.public_key().public_bytes_raw()
    try:
        connection.sendall(hello)
    except OSError as error:
        raise LinkClosed(f"{peer} is gone: {error}.") from error
    reply = read_exactly(connection, _KEY_BYTES, peer)
    context = _context(session, hello, reply, identity.public[identity.name], identity.public[peer])
    send_key, receive_key = _establish(identity, ephemeral, peer, reply, context, calling=True)
    link = Link(connection, peer, send_key, receive_key)
    link.sent.handshake, link.received.handshake = len(hello), len(reply)
    link.send(CONFIRM)
    link.receive(CONFIRM, most=0)
    return link


def answer(connection: socket.socket, identity: Identity, session: bytes) -> Link:
    """Makes the called side's handshake; the caller must be one of the known identities."""
    hello = read_exactly(connection, 6 + _KEY_BYTES, "a caller")
    callers = {_name_bytes(name): name for name in identity.public if name != identity.name}
    peer = callers.get(hello[1:6], "")
    if hello[:1] != _VERSION or not peer:
        connection.close()
        raise TamperedMessage("a caller that is not enrolled, or speaks another version, was turned away.")
    ephemeral = X25519PrivateKey.generate()
    reply = ephemeral.public_key().public_bytes_raw()
    context = _context(session, hello, reply, identity.public[peer], identity.public[identity.name])
    receive_key, send_key = _establish(identity, ephemeral, peer, hello[6:], context, calling=False)
    try:
        connection.sendall(reply)
    except OSError as error:
        raise LinkClosed(f"{peer} is gone: {error}.") from error
    link = Link(connection, peer, send_key, receive_key)
    link.sent.handshake, link.received.handshake = len(reply), len(hello)
    link.receive(CONFIRM, most=0)
    link.send(CONFIRM)
    return link


def _establish(
    identity: Identity, ephemeral: X25519PrivateKey, peer: str, peer_ephemeral: bytes, context: bytes, calling: bool
) -> tuple[bytes, bytes]:
    try:
        return _derive(identity, ephemeral, peer, peer_ephemeral, context, calling)
    except ValueError as error:  # a point of low order
        raise TamperedMessage(f"{peer} sent an invalid key.") from error
