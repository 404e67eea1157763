"""Words of messages: what is said of one that nobody knows, of counts and contexts, and of what others wrote."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable


def unknown(what: str, word: str, known: Iterable[str]) -> ValueError:
    """An error to raise for `word`, which is not a `what` (kernel, device, ...)."""
    words = list(known)
    near = difflib.get_close_matches(word.lower(), words, n=1)
    hint = f"did you mean '{near[0]}'? Known are" if near else "use one of"
    return ValueError(f"unknown {what} '{word}': {hint} {', '.join(words)}")


def counted(number: int, one: str, several: str = "") -> str:
    """``1 entry``, ``2 entries``."""
    return f"{number} {one if number == 1 else several or one + 's'}"


def ranges(some: Collection[int], every: Iterable[int]) -> str:
    """``1, 2, 8-64``: numbers of a longer list, three or more that follow one another there as a range."""
    runs: list[list[int]] = [[]]
    for number in sorted(set(every)):
        if number in some:
            runs[-1].append(number)
        elif runs[-1]:
            runs.append([])
    return ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs if r)


def listed(numbers: Collection[int]) -> str:
    """``1, 2, 8``; of many the ends, ``1 to 512``."""
    return ", ".join(map(str, sorted(numbers))) if len(numbers) <= 8 else f"{min(numbers)} to {max(numbers)}"


def written(tokens: int) -> str:
    """A context as the command line takes it: 1M, 128k, 1000."""
    for unit, size in (("M", 1 << 20), ("k", 1 << 10)):
        if tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)


def visible(line: str) -> str:
    """What a terminal shows and doesn't obey: others' words may hold codes that clear it or write elsewhere, that turn
    the direction of writing, and bytes that are no text."""
    return line if line.isprintable() else "".join(c if c.isprintable() else "?" for c in line)
