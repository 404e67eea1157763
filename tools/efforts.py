"""How much a search spends: ``--effort`` as one table. What each costs and gains on recorded spaces: docs/search.md."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Effort:
    """One row.

    Attributes:
        trials: candidates of a problem, those of earlier runs included.
        patience: candidates in a row without a better one after which the search ends; None for never.
        halving: whether a candidate that is far behind is not measured to the end.
        references: whether the design that the project starts from is tried, and kernels that no server runs are timed.
        finalists: candidates of the final.
        rounds: of each finalist and length there.
    """

    trials: int
    patience: int | None
    halving: bool
    references: bool
    finalists: int
    rounds: int


EFFORTS = {
    "quick": Effort(trials=32, patience=None, halving=True, references=False, finalists=2, rounds=9),
    "normal": Effort(trials=96, patience=48, halving=True, references=True, finalists=4, rounds=27),
    "full": Effort(trials=400, patience=120, halving=False, references=True, finalists=8, rounds=45),
}


def named(name: str) -> Effort:
    """Raises:
    ValueError: there is none of that name.
    """
    if name not in EFFORTS:
        raise ValueError(f"unknown effort '{name}': use {', '.join(EFFORTS)}")
    return EFFORTS[name]
