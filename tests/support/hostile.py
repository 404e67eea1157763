"""Files that must not be taken, by name, each with a twin that differs in that alone and must be."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from exports import make_entry

Json = dict[str, Any]
CODE = "__import__('os').system('touch /tmp/owned')"
TEMPLATE = "{{ 7*7 }}"
LINES = "fine\nimport os"
SQL = "x'); DROP TABLE trial; --"
PATH = "../../../etc/passwd"


@lru_cache(maxsize=1)
def _text() -> str:
    return json.dumps({"entries": [make_entry(8), make_entry(16)], "schema_version": 2})


def valid() -> Json:
    """An export of two entries."""
    catalogue: Json = json.loads(_text())
    return catalogue


def _at(catalogue: Json, path: str) -> tuple[Any, Any]:
    """The container of a value, and its key: a path from the first entry."""
    at: Any = catalogue["entries"][0]
    *way, last = path.split("/")
    for step in way:
        at = at[int(step) if isinstance(at, list) else step]
    return at, int(last) if isinstance(at, list) else last


def put(path: str, value: Any) -> Callable[[Json], str]:
    def change(catalogue: Json) -> str:
        at, key = _at(catalogue, path)
        at[key] = value
        return json.dumps(catalogue)

    return change


def drop(path: str) -> Callable[[Json], str]:
    def change(catalogue: Json) -> str:
        at, key = _at(catalogue, path)
        del at[key]
        return json.dumps(catalogue)

    return change


def literal(path: str, text: str) -> Callable[[Json], str]:
    """A value that `json.dumps` would not write."""

    def change(catalogue: Json) -> str:
        at, key = _at(catalogue, path)
        at[key] = "@here@"
        return json.dumps(catalogue).replace('"@here@"', text)

    return change


def top(**values: Any) -> Callable[[Json], str]:
    return lambda catalogue: json.dumps({**catalogue, **values})


def text(change: Callable[[str], str]) -> Callable[[Json], str]:
    return lambda catalogue: change(json.dumps(catalogue))


def spelled(length: str) -> Callable[[Json], str]:
    """128 as a key of the times, written otherwise."""
    return text(lambda s: s.replace('"times_us": {"128"', f'"times_us": {{"{length}"', 1))


#: Every field of an entry that holds a string.
STRINGS = (
    "problem/op",
    "problem/layout",
    "problem/silicon/capability",
    "problem_key",
    "device/capability",
    "device/name",
    "environment/dsv4tune",
    "environment/triton",
    "environment/ptxas",
    "environment/torch",
    "environment/driver",
    "environment/clocks",
    "final/runner_up/schedule",
    "config/dialect",
    "config/schedule",
    "provenance",
    "yardstick",
    "baseline/name",
    "baseline/version",
    "checked_by",
    "resources/mma",
    "resources/async_copy",
    "resources/binary",
    "source_sha",
    "finished_at",
)
#: And those that hold a number.
NUMBERS = (
    "problem/rows",
    "problem/silicon/sm_count",
    "device/sm_count",
    "device/l2_bytes",
    "config/block_t",
    "config/splits",
    "range/width",
    "range/lengths/0",
    "range/weights/0",
    "score",
    "times_us/128",
    "final/rounds",
    "final/spread",
    "final/runner_up_score",
    "spread/128",
    "baseline/times_us/128",
    "error",
    "resources/registers",
    "resources/instructions",
)

HOSTILE: dict[str, Callable[[Json], str]] = {
    **{f"code in {path}": put(path, CODE) for path in STRINGS},
    **{f"a template in {path}": put(path, TEMPLATE) for path in STRINGS},
    **{f"a line end in {path}": put(path, LINES) for path in STRINGS},
    **{f"SQL in {path}": put(path, SQL) for path in STRINGS},
    **{f"a way out of the folder in {path}": put(path, PATH) for path in STRINGS},
    **{f"a huge number in {path}": literal(path, "1" + "0" * 30) for path in NUMBERS},
    **{f"a number of 10,000 digits in {path}": literal(path, "9" * 10_000) for path in NUMBERS},
    **{f"1e999 in {path}": literal(path, "1e999") for path in NUMBERS},
    **{f"NaN in {path}": literal(path, "NaN") for path in NUMBERS},
    **{f"-Infinity in {path}": literal(path, "-Infinity") for path in NUMBERS},
    **{f"a negative number in {path}": put(path, -1) for path in NUMBERS},
    **{f"a string for the number in {path}": put(path, "64") for path in NUMBERS},
    **{f"a list in {path}": put(path, [1]) for path in NUMBERS},
    **{
        f"an unknown field in {path or 'the entry'}": put(f"{path}{'/' if path else ''}extra", 1)
        for path in (
            "",
            "problem",
            "problem/silicon",
            "device",
            "environment",
            "config",
            "range",
            "baseline",
            "resources",
        )
    },
    **{
        f"{path} is missing": drop(path)
        for path in ("problem", "problem/heads", "device/name", "config/splits", "range/weights", "score", "source_sha")
    },
    "an unknown field at the top": top(extra=1),
    "a version of the future": top(schema_version=3),
    "version true": top(schema_version=True),
    "version 1.0": text(lambda s: s.replace('"schema_version": 2', '"schema_version": 2.0')),
    "no version": lambda c: json.dumps({"entries": c["entries"]}),
    "no entries": lambda c: json.dumps({"schema_version": 2}),
    "newer fields in an older version": top(schema_version=1),
    "entries are an object": top(entries={}),
    "an entry is a number": top(entries=[1]),
    "the file is a list": lambda c: json.dumps([c]),
    "an empty file": text(lambda s: ""),
    "the same key twice at the top": text(lambda s: s[:-1] + ', "schema_version": 2}'),
    "the same key twice in an entry": text(lambda s: s.replace('"score":', '"score": 0.1, "score":', 1)),
    "the same key twice far inside": text(lambda s: s.replace('"sm_count":', '"sm_count": 1, "sm_count":', 1)),
    "the same length twice": text(lambda s: s.replace('"128":', '"128": 1.0, "128":', 1)),
    **{f"a length written '{word}'": spelled(word) for word in ("0128", "+128", " 128", "1_28", "128.0", "1" * 30)},
    "the same length twice, written in two ways": text(lambda s: s.replace('"128":', '"128": 1.0, "0128":', 1)),
    "a time from which no score follows": literal("times_us/128", "5e-324"),
    "deep lists": literal("config/splits", "[" * 20_000 + "]" * 20_000),
    "deep objects": literal("config/splits", '{"a":' * 5_000 + "1" + "}" * 5_000),
    "deep and never closed": literal("config/splits", "[" * 60_000),
    "an entry of 100 KB": put("environment/driver", "x" * 100_000),
    "a million lengths": put("range/lengths", list(range(1, 9_000))),
    "cut off": text(lambda s: s[: len(s) // 2]),
    "more behind the end": text(lambda s: s + "{}"),
    "a comment": text(lambda s: s.replace("{", "{ /* */", 1)),
    "a trailing comma": text(lambda s: s.replace("}, {", "},, {", 1)),
    "a pickle": text(lambda s: "cos\nsystem\n(S'true'\ntR."),
    "YAML": text(lambda s: "!!python/object/apply:os.system ['true']"),
    "no UTF-8": text(lambda s: s.replace("card", "c\udcff")),
    "a NUL": text(lambda s: s.replace("card", "c\\u0000")),
    "letters that look like others": text(lambda s: s.replace("card", "c\\u0430rd")),
    "text that turns around": text(lambda s: s.replace("card", "\\u202ecard")),
    "half a surrogate": text(lambda s: s.replace("card", "\\ud800")),
    "another kernel's key": put("problem_key", "mla_decode rows=8"),
    "the key of other rows": lambda c: put("problem_key", c["entries"][1]["problem_key"])(c),
    "no such kernel": put("problem/op", "matmul"),
    "a config that the space has not": put("config/block_t", 65),
    "a config value of another word": put("config/schedule", "kq"),
    "true as a config value": put("config/num_stages", True),
    "4.0 as a config value": literal("config/num_stages", "4.0"),
    "1.5 rows": put("problem/rows", 1.5),
    "true rows": put("problem/rows", True),
    "1 for false": put("problem/clean", 1),
    "another layout": put("problem/layout", "fp16"),
    "silicon that differs from its problem's": put("device/sm_count", 170),
    "sm_121 for sm_120": put("device/capability", "12.1"),
    "more shared memory than there is": put("resources/shared_bytes", 200_000),
    "another source": put("source_sha", "0" * 64),
    "a hash in capitals": lambda c: put("source_sha", c["entries"][0]["source_sha"].upper())(c),
    "a score that its times don't give": put("score", 0.001),
    "measured, and checked by the interpreter": put("checked_by", "interpreter"),
    "predicted, beside a baseline": put("provenance", "predicted"),
    "times of lengths outside of its range": put("times_us", {"64": 1.0, "262208": 900.0}),
    "a baseline without its times": put("baseline/times_us", {}),
    "no times": put("times_us", {}),
    "an error over any tolerance": put("error", 0.5),
    "a length beyond its width": put("range/lengths", [128, 999_999]),
    "the second entry is bad": lambda c: json.dumps(
        {**c, "entries": [c["entries"][0], {**c["entries"][1], "score": 5.0}]}
    ),
}


def twins(name: str) -> tuple[str, str]:
    """The hostile file, and the valid one that it was made of."""
    return HOSTILE[name](valid()), json.dumps(valid())
