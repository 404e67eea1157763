"""Words of messages: what is said of one that nobody knows, of a count of things, and of what others wrote."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown(what: str, word: str, known: Iterable[str]) -> ValueError:
    """An error to raise for `word`, which is not a `what` (kernel, device, ...)."""
    words = list(known)
    near = difflib.get_close_matches(word.lower(), words, n=1)
    hint = f"did you mean '{near[0]}'? Known are" if near else "use one of"
    return ValueError(f"unknown {what} '{word}': {hint} {', '.join(words)}")


def counted(number: int, one: str, several: str = "") -> str:
    """``1 entry``, ``2 entries``."""
    return f"{number} {one if number == 1 else several or one + 's'}"


def visible(line: str) -> str:
    """What a terminal shows and doesn't obey: others' words may hold codes that clear it or write elsewhere, that turn
    the direction of writing, and bytes that are no text."""
    return line if line.isprintable() else "".join(c if c.isprintable() else "?" for c in line)
