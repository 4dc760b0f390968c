"""The bytes that the entries of a tokenizer's vocabulary represent."""

from __future__ import annotations

import re

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's mapping from characters to bytes: printable bytes to themselves, others from character 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def byte_level_bytes(token: str, alphabet: dict[str, int]) -> bytes:
    """Return the bytes of an entry in GPT-2's byte alphabet; an entry with any other character is plain text."""
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:
        return token.encode()


def fallback_byte(token: str) -> int | None:
    """Return the byte that an entry such as <0x0A> represents; None for other entries."""
    match = _BYTE_TOKEN.fullmatch(token)
    return int(match[1], 16) if match else None
