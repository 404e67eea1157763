"""The models that are served: what command lines need to know of one that is not here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsv4tune.codegen.words import unknown

#: Of a layer's compressed cache, by its name: cached tokens an entry.
RATIOS = {"none": 0, "c4": 4, "c128": 128}


@dataclass(frozen=True)
class Model:
    """One DeepSeek-V4, by what its two sizes differ in. Both have 64 index heads, which no ranks share.

    Attributes:
        name: the word for ``--model``.
        title: what its makers call it.
        heads: query heads, shared by the ranks of an attention group.
        topk: entries that the indexer selects: columns of the c4 cache's indices.
        layers: by compressed cache, draft layers left out.
    """

    name: str
    title: str
    heads: int
    topk: int
    layers: Mapping[str, int]

    def __str__(self) -> str:
        return self.name

    def ratios(self, drafts: bool) -> tuple[int, ...]:
        """Of the layers that a server runs; a draft layer has no compressed cache."""
        return tuple(ratio for name, ratio in RATIOS.items() if name in self.layers or (drafts and not ratio))

    def heads_of(self, ranks: int) -> int:
        """Query heads of one of so many ranks.

        Raises:
            ValueError: they don't divide the heads.
        """
        if self.heads % ranks:
            raise ValueError(f"--tp {ranks} doesn't divide the {self.heads} query heads of {self.title}")
        return self.heads // ranks


# Each model's config.json, its compress_ratios without the draft layer's.
FLASH = Model("flash", "DeepSeek-V4-Flash", heads=64, topk=512, layers={"none": 2, "c4": 21, "c128": 20})
PRO = Model("pro", "DeepSeek-V4-Pro", heads=128, topk=1024, layers={"c4": 30, "c128": 31})
MODELS = {model.name: model for model in (FLASH, PRO)}


def named(name: str) -> Model:
    """The table's row for ``--model``.

    Raises:
        ValueError: unknown.
    """
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    return MODELS[name]


def by_topk(topk: int) -> Model | None:
    """The one whose indexer selects so many entries, which is the width of its c4 cache's indices."""
    return next((model for model in MODELS.values() if model.topk == topk), None)


def by_path(path: Any) -> Model:
    """What a server's ``--model-path`` is taken for by its name alone: Pro where it says V4-Pro, else Flash."""
    return PRO if re.search(r"v4[-_ ]?pro(?![a-z])", str(path), re.IGNORECASE) else FLASH
