"""Successive halving: a candidate that is far behind at a part of its measurements is not measured to the end."""

from __future__ import annotations

from collections.abc import Sequence

import optuna

#: Rounds of every length that a candidate is judged by before the rest of them are taken.
FIRST_ROUNDS = 3


class Halving:
    """Who goes on, by Optuna's pruner: of those that came as far, the better half.

    A candidate's stages are its lengths, the shortest and cheapest first, with a few rounds each, then all rounds of
    each; the halves are taken after 1, 2, 4, 8 stages. One object judges the candidates of one problem on one GPU.
    """

    def __init__(self) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._study = optuna.create_study(
            pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2)
        )

    def candidate(self) -> Candidate:
        return Candidate(self._study)


class Candidate:
    """One that is being measured."""

    def __init__(self, study: optuna.Study) -> None:
        self._study, self._trial, self._stage = study, study.ask(), 0

    def falls_behind(self, score: float) -> bool:
        """Whether to stop, by the score over the lengths that were measured so far."""
        self._stage += 1
        self._trial.report(score, self._stage)
        return self._trial.should_prune()

    def ends(self, score: float) -> None:
        """Measured to the end, or as far as it came."""
        self._study.tell(self._trial, score)


def stages(lengths: Sequence[int], rounds: int, halving: bool = True) -> list[tuple[int, int]]:
    """Lengths, each with the rounds that are taken of it by then; without halving all at once."""
    if not halving:
        return [(length, rounds) for length in lengths]
    return [(length, taken) for taken in (min(FIRST_ROUNDS, rounds), rounds) for length in sorted(lengths)]
