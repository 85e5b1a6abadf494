"""A listener that shakes hands by TLS: connections are accepted here, and each goes to its protocol after its handshake.

A server of asyncio would do the same, but nobody could count the connections whose handshake has not ended, or learn why one
failed.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass

logger = logging.getLogger(__name__)

ACCEPTED_AT_ONCE = 8
"""The most connections that are accepted in one turn of the loop."""
NO_ROOM_S = 1.0
"""The pause after the system had no room for one more connection."""
CLOSING_S = 2.0
"""How long the other side of a link has to take what is unsent and to agree that the link is closed."""
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_WORDS = {
    "HTTP_REQUEST": "it speaks HTTP without TLS",
    "WRONG_VERSION_NUMBER": "it does not speak TLS",
    "UNKNOWN_PROTOCOL": "it does not speak TLS",
    "UNEXPECTED_MESSAGE": "it does not speak TLS",
    "RECORD_LAYER_FAILURE": "it does not speak TLS",
    "PACKET_LENGTH_TOO_LONG": "it does not speak TLS",
    "BAD_RECORD_TYPE": "it does not speak TLS",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it shows no certificate",
    "UNSUPPORTED_PROTOCOL": "it speaks an older version of TLS",
    "NO_SHARED_CIPHER": "it has no cipher in common with us",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it asks for a certificate",
    "TLSV1_ALERT_UNKNOWN_CA": "it does not know the authority of our certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "it says that our certificate has expired",
    "SSLV3_ALERT_BAD_CERTIFICATE": "it refuses our certificate",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "it refuses our certificate",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "it says that our certificate is for another purpose",
    "TLSV1_ALERT_PROTOCOL_VERSION": "it speaks another version of TLS",
}


def why(error: BaseException) -> str:
    """Says of the other side why a handshake failed. A side that refuses a certificate tells its own log alone, because
    asyncio sends no alert.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        reason = error.reason or ""
        return _WORDS.get(reason) or reason.replace("_", " ").lower() or "the handshake failed"
    if isinstance(error, TimeoutError | ConnectionAbortedError):
        return "it did not finish its handshake in time"
    return "it ended the connection during the handshake: if it refused our certificate, its log says why"


@dataclass(frozen=True, slots=True)
class Hands:
    """The two ways of a connection, as the listener's owner sees them."""

    begin: Callable[[str], asyncio.Protocol | None]
    """Returns the protocol for an address, which is called once the handshake is done; or None to refuse it at once."""
    failed: Callable[[asyncio.Protocol, str, str], None]
    """Is told of a protocol that gets no connection, the address, and why."""


class TlsListener:
    def __init__(
        self,
        sockets: Sequence[socket.socket],
        context: ssl.SSLContext,
        hands: Hands,
        handshake_s: float,
        closing_s: float = CLOSING_S,
    ) -> None:
        """The sockets listen already. They are closed with this listener. A connection that we close loses what its other
        side has not taken `closing_s` later.
        """
        self.sockets = tuple(sockets)
        self._context = context
        self._hands = hands
        self._handshake_s = handshake_s
        self._closing_s = closing_s
        self._loop = asyncio.get_running_loop()
        self._handshakes: dict[asyncio.Task[None], str] = {}
        """The handshakes that have not ended → the addresses of their other sides."""
        self._is_closed = False
        for one in self.sockets:
            one.setblocking(False)
            self._loop.add_reader(one, self._accept, one)

    def is_serving(self) -> bool:
        return not self._is_closed

    @property
    def num_handshakes(self) -> int:
        """The number of handshakes that have not ended."""
        return len(self._handshakes)

    def num_handshakes_of(self, address: str) -> int:
        return sum(one == address for one in self._handshakes.values())

    def close(self) -> None:
        """Accepts nothing more, and ends the handshakes. Connections go on."""
        if self._is_closed:
            return
        self._is_closed = True
        for one in self.sockets:
            self._loop.remove_reader(one)
            one.close()
        for handshake in self._handshakes:
            handshake.cancel()

    async def wait_closed(self) -> None:
        """Waits for the end of the handshakes."""
        await asyncio.gather(*self._handshakes, return_exceptions=True)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                accepted, peer = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                logger.error("no_room_for_connections", extra={"why": error.strerror})
                self._loop.remove_reader(listening)
                self._loop.call_later(NO_ROOM_S, self._listen_again, listening)
                return
            accepted.setblocking(False)
            address = peer[0] if isinstance(peer, tuple) else ""
            protocol = self._hands.begin(address)
            if protocol is None:
                accepted.close()
                continue
            handshake = self._loop.create_task(self._shake(accepted, address, protocol))
            self._handshakes[handshake] = address
            handshake.add_done_callback(self._handshakes.pop)

    def _listen_again(self, listening: socket.socket) -> None:
        if not self._is_closed:
            self._loop.add_reader(listening, self._accept, listening)

    async def _shake(self, accepted: socket.socket, address: str, protocol: asyncio.Protocol) -> None:
        try:
            await self._loop.connect_accepted_socket(
                lambda: protocol,
                accepted,
                ssl=self._context,
                ssl_handshake_timeout=self._handshake_s,
                ssl_shutdown_timeout=self._closing_s,
            )
        except OSError as error:  # of TLS, too
            self._hands.failed(protocol, address, why(error))
        except asyncio.CancelledError:
            self._hands.failed(protocol, address, "this process ends")
            raise
