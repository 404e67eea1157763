"""Which words of a config decide its score: Optuna's importances over the stored trials, and slices."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.trial import create_trial

from dsv4tune.tuned.records import Tried

#: PED-ANOVA compares the best tenth with the rest: with fewer trials there is no tenth to speak of.
FEWEST_TRIALS = 30
#: What the best trials are, as a share.
TOP = 0.1
SLICES = 4


def importances(trials: Sequence[Tried]) -> dict[str, float]:
    """Shares by knob, the largest first; empty where there are too few trials to say.

    Knobs that every trial has alike are left out. By PED-ANOVA, which asks what sets the best tenth apart.
    """
    if len(trials) < FEWEST_TRIALS:
        return {}
    words = [word for word in trials[0].config if all(word in t.config for t in trials)]
    values = {word: values_of(word, trials) for word in words}
    varied = {word: CategoricalDistribution(found) for word, found in values.items() if len(found) > 1}
    if not varied:
        return {}
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study()
    for trial in trials:
        params = {word: trial.config[word] for word in varied}
        study.add_trial(create_trial(params=params, distributions=dict(varied), value=math.log(trial.score or 1.0)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=TOP)
        found = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def values_of(word: str, trials: Sequence[Tried]) -> list[int | str]:
    """What a knob was in these trials, numbers first and in order."""
    return sorted({t.config[word] for t in trials}, key=lambda value: (isinstance(value, str), value))
