"""Ranks agree on one table, or none has it: a write-once verdict in the process group's store, with a time limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from dsv4tune.codegen.compile import first_line

#: Seconds between looks; a store answers in well under a millisecond.
_PAUSE_S = 0.02
#: Seconds past the limit until a store counts as dead.
GRACE_S = 5.0


def agree(store: Any, name: str, rank: int, ranks: Sequence[int], digest: str, limit_s: float) -> str:
    """ "" where all ranks have this digest, else one line that says why none may use its table.

    Never a collective: a rank without the plugin would hang it. Whoever knows first writes the verdict, once; all read
    it, a late rank too. A store that doesn't answer is silence.

    Args:
        store: of the process group: ``set``, ``get``, ``check`` and ``compare_set``.
        name: of this comparison, the same on all ranks.
    """
    answer: list[str] = []

    def ask() -> None:
        try:
            answer.append(_ask(store, f"dsv4tune/{name}", rank, ranks, digest, limit_s))
        except Exception as error:
            answer.append(f"the process group's store failed ({first_line(error)})")

    # A thread of its own, because a store's calls may block for longer than any limit of ours.
    thread = threading.Thread(target=ask, name="dsv4tune-ranks", daemon=True)
    thread.start()
    thread.join(limit_s + GRACE_S)
    return answer[0] if answer else f"the process group's store gave no answer in {limit_s + GRACE_S:g} s"


def _ask(store: Any, name: str, rank: int, ranks: Sequence[int], digest: str, limit_s: float) -> str:
    store.set(f"{name}/{rank}", digest)
    deadline = time.monotonic() + limit_s
    waiting = [other for other in ranks if other != rank]
    proposal = f"on {digest}"
    while waiting and proposal.startswith("on"):
        if store.check([f"{name}/verdict"]):
            break
        arrived = [other for other in waiting if store.check([f"{name}/{other}"])]
        for other in arrived:
            theirs = _text(store.get(f"{name}/{other}"))
            if theirs != digest:
                proposal = f"off rank {other} has table {theirs}, rank {rank} has {digest}"
        waiting = [other for other in waiting if other not in arrived]
        if waiting and time.monotonic() > deadline:
            proposal = f"off rank {waiting[0]} said nothing in {limit_s:g} s"
        if waiting:
            time.sleep(_PAUSE_S)
    # The first proposal stays; everyone, however late, is told that one.
    verdict = _text(store.compare_set(f"{name}/verdict", "", proposal))
    return "" if verdict == f"on {digest}" else verdict.removeprefix("off ").replace("on ", "the others agreed on ")


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
