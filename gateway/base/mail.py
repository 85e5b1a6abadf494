"""Mail through the operator's SMTP server, in a thread. This module knows neither the content nor the reason."""

from __future__ import annotations

import asyncio
import smtplib
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from email.message import EmailMessage
from urllib.parse import unquote, urlsplit

TIMEOUT_S = 15.0
PORTS = {"smtp": 25, "smtps": 465}


class MailFailed(Exception):
    """The server did not take the mail."""


@dataclass(frozen=True)
class Mailer:
    """A sender of mail. `url` is smtp://[user:password@]host[:port] (STARTTLS where the server offers it) or smtps://.
    The server's certificate must be one that this machine trusts.
    """

    url: str
    sender: str

    async def send(self, recipients: Sequence[str], subject: str, text: str) -> None:
        """Sends one message. Raises `MailFailed`."""
        try:
            message = EmailMessage()
            message["From"], message["To"] = self.sender, ", ".join(recipients)
            message["Subject"] = subject
            message.set_content(text)
            await asyncio.to_thread(self._send, message)
        except (OSError, ValueError, smtplib.SMTPException) as error:
            raise MailFailed(type(error).__name__) from error

    def _send(self, message: EmailMessage) -> None:
        parts = urlsplit(self.url)
        host, port = parts.hostname or "", parts.port or PORTS[parts.scheme]
        verified = ssl.create_default_context()
        with (
            smtplib.SMTP_SSL(host, port, timeout=TIMEOUT_S, context=verified)
            if parts.scheme == "smtps"
            else smtplib.SMTP(host, port, timeout=TIMEOUT_S)
        ) as server:
            if parts.scheme == "smtp" and server.ehlo() and server.has_extn("starttls"):
                server.starttls(context=verified)
            if parts.username:
                server.login(unquote(parts.username), unquote(parts.password or ""))
            server.send_message(message)
