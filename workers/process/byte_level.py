"""The alphabet of byte-level BPE: each byte has a printable character that represents it in the vocabulary."""

from __future__ import annotations


def _alphabet() -> dict[str, int]:
    """Returns the alphabet. Printable Latin-1 bytes represent themselves, the others are U+0100 and up, in order."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHAR = _alphabet()
