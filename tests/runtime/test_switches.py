"""Every switch is in one table of the documents, and a value that makes no sense is told and changes nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dsv4tune.runtime import switches

ROOT = Path(__file__).parent.parent.parent
DOCUMENT = ROOT / "docs" / "environment.md"


def test_every_variable_is_documented_and_every_documented_one_is_read() -> None:
    read = set()
    for path in (ROOT / "runtime").glob("*.py"):
        read |= set(re.findall(r"\b(?:DSV4TUNE|SGLANG)_[A-Z0-9_]+", path.read_text()))
    documented = set(re.findall(r"^\| `([A-Z0-9_]+)`", DOCUMENT.read_text(), re.M))
    theirs = {name for names in ("SGLANG_OPT", "SGLANG_FP8", "SGLANG_SM120_FLASHMLA") for name in read if names in name}
    assert read - documented - theirs == set()
    assert documented <= read | {"DSV4TUNE_DB", "DSV4TUNE_CACHE", "TRITON_CACHE_DIR"}


def test_defaults() -> None:
    found = switches.read({})
    assert found.kernels == ("indexer", "mla_decode") and found.policy == "measured" and not found.insist
    assert found.rank_s == 60 and found.jobs == 0 and found.notes == ()


@pytest.mark.parametrize(
    ("variables", "note"),
    [
        ({"DSV4TUNE_DISABLE": "indxer"}, "'indxer' is not 0, 1 or one of indexer, mla_decode"),
        ({"DSV4TUNE_POLICY": "bold"}, "is not measured, strict or predicted"),
        ({"DSV4TUNE_JOBS": "many"}, "DSV4TUNE_JOBS=many is no number"),
        ({"DSV4TUNE_RANK_SECONDS": "-1"}, "DSV4TUNE_RANK_SECONDS=-1 is no number of 0 or more"),
        ({"DSV4TUNE_RANK_SECONDS": "nan"}, "taken as 60"),
        ({"SGLANG_SM120_MMA_INDEXER": "maybe"}, "is not 0 or 1; taken as unset"),
    ],
)
def test_values_that_make_no_sense(variables: dict[str, str], note: str) -> None:
    found = switches.read(variables)
    assert len(found.notes) == 1 and note in found.notes[0]
    assert found == switches.Switches(database=found.database, notes=found.notes)


def test_words_are_read_as_sglang_reads_them() -> None:
    for word in ("1", "true", "YES", "on"):
        assert switches.read({"SGLANG_SM120_MMA_INDEXER": word}).insist == ("indexer",)
        assert switches.read({"DSV4TUNE_DISABLE": word}).kernels == ()
    for word in ("0", "false", "No", "off"):
        assert switches.read({"SGLANG_SM120_MMA_INDEXER": word}).kernels == ("mla_decode",)
    assert switches.read({"DSV4TUNE_DISABLE": "indexer, mla_decode"}).kernels == ()
