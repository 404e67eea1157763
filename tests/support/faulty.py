"""A check of a kernel whose source was changed in one place."""

from __future__ import annotations

import hashlib
from typing import Any
from unittest.mock import patch

from dsv4tune.codegen.op import Verdict
from dsv4tune.codegen.render import Source, render
from dsv4tune.tools import measure


def interpret(problem: Any, config: Any, old: str, new: str) -> Verdict:
    def wrong(*arguments: Any) -> Source:
        source = render(*arguments)
        assert old in source.text, old
        text = source.text.replace(old, new)
        return Source(f"faulty_{hashlib.sha256(text.encode()).hexdigest()[:16]}", text, source.sha)

    with patch.object(measure, "render", wrong):
        return measure.interpret_job(problem, config)
