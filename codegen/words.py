"""What is said of a word that nobody knows: the nearest known one, and all of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown(what: str, word: str, known: Iterable[str]) -> ValueError:
    """An error to raise for `word`, which is not a `what` (kernel, device, ...)."""
    words = list(known)
    near = difflib.get_close_matches(word.lower(), words, n=1)
    hint = f"did you mean '{near[0]}'? Known are" if near else "use one of"
    return ValueError(f"unknown {what} '{word}': {hint} {', '.join(words)}")
