"""The ``dsv4tune`` command: parse, call one function, print."""

from __future__ import annotations

import contextlib
import json
import os
import re
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from dsv4tune import __version__
from dsv4tune.codegen.space import Config

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,  # which would read "[default: ...]" as markup
    add_completion=True,
    pretty_exceptions_enable=False,
    help="Tune and generate DeepSeek-V4's decode kernels for your own GPU.",
)


class Sampler(str, Enum):
    tpe = "tpe"
    random = "random"
    grid = "grid"


Db = Annotated[
    Path | None, typer.Option("--db", help="SQLite database [default: $DSV4TUNE_DB, else the user's data folder]")
]
Heads = Annotated[int | None, typer.Option(min=1, help="mla_decode: query heads of a rank [default: 8]")]
Tp = Annotated[int | None, typer.Option(min=1, help="mla_decode: the same, as ranks that share the model's 64 heads.")]
Cache = Annotated[
    str | None, typer.Option(help="mla_decode: compressed cache of the layer: c4, c4-pro, c128 or none [default: c4]")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout; everything else goes to stderr.")]


def fail(error: object) -> NoReturn:
    """One line on stderr, exit status 2."""
    say("dsv4tune: " + "; ".join(line.strip() for line in str(error).splitlines()))
    raise typer.Exit(2)


def say(text: str) -> None:
    # Whoever read stderr may be gone, as after `| head`: no reason to end a search.
    with contextlib.suppress(OSError):
        typer.echo(text, err=True)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dsv4tune {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    # A shell may have closed stdout or stderr: a database or a pipe that opens next must not get its number.
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)


@app.command("search")
def search_command(
    kernel: Annotated[str, typer.Option(help="What to tune: indexer or mla_decode.")],
    target: Annotated[str | None, typer.Option(help="Compute capability, such as sm_120; needs no GPU.")] = None,
    device: Annotated[str | None, typer.Option(help="Card, such as rtx-pro-6000; needs no GPU.")] = None,
    rows: Annotated[
        str, typer.Option(help="Query rows of a call: 64, a list 1,16,64, or 'captured' for SGLang's graph sizes.")
    ] = "64",
    max_context: Annotated[str, typer.Option(help="Context length of the server, in tokens.")] = "1048576",
    draft_tokens: Annotated[
        int, typer.Option(min=0, help="Draft tokens of a request when verifying; --rows counts them.")
    ] = 0,
    heads: Heads = None,
    tp: Tp = None,
    cache: Cache = None,
    lengths: Annotated[str | None, typer.Option(help="Live lengths to score over, such as 128,2048.")] = None,
    weights: Annotated[str | None, typer.Option(help="What each length counts, such as 1,2.")] = None,
    trials: Annotated[int, typer.Option(help="Candidates for a problem, those of earlier runs included.")] = 64,
    budget: Annotated[str | None, typer.Option(help="Stop after this time, such as 90s, 10m or 1h.")] = None,
    sampler: Annotated[Sampler, typer.Option(help="How candidates are proposed.")] = Sampler.tpe,
    seed: Annotated[int, typer.Option(help="Of the sampler and the inputs.")] = 0,
    jobs: Annotated[int | None, typer.Option(min=1, help="Compiler processes [default: one a core]")] = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Search for the fastest capture-safe config of a kernel and keep it in the database.

    Measures on the GPU here; without one (or for another card) it compiles, checks through Triton's interpreter and
    predicts. Stops at --trials, --budget or Ctrl-C, and goes on from there when run again.

    The budget is that of all rows together. Lengths and widths count cached entries, one for 4 tokens of context.

    Exit status: 0 with a best config for every row count, 1 where one has none, 2 for bad input.
    """
    from dsv4tune.codegen import ops
    from dsv4tune.tools import tune
    from dsv4tune.tuned import store

    try:
        ops.get(kernel)
        card, on_gpu = tune.choose_device(device, target)
        if trials < 1:
            raise ValueError(f"--trials must be at least 1, not {trials}")
        if weights is not None and lengths is None:
            raise ValueError("--weights goes with --lengths: name both")
        request = tune.Request(
            kernel=kernel,
            rows=_rows(rows, draft_tokens),
            max_context=_number(max_context, "--max-context"),
            draft_tokens=draft_tokens,
            options=_given(heads=heads, tp=tp, cache=cache),
            device=card,
            on_gpu=on_gpu,
            trials=trials,
            budget_s=None if budget is None else _duration(budget),
            seed=seed,
            sampler=sampler.value,
            jobs=jobs,
            db=db or store.default_path(),
            lengths=None if lengths is None else [_number(n, "--lengths") for n in lengths.split(",")],
            weights=None if weights is None else [_weight(w) for w in weights.split(",")],
        )
        results = tune.tune(request, say)
    except (ValueError, store.StoreError, OSError) as error:
        fail(error)
    if as_json:
        typer.echo(json.dumps(results[0] if len(request.rows) == 1 else {"results": results}))
    else:
        for result in results:
            typer.echo(_summary(result))
    if any(result["best"] is None for result in results):
        raise typer.Exit(1)


@app.command("bench")
def bench_command(
    kernel: Annotated[str, typer.Option(help="What to time: indexer or mla_decode.")],
    peers: Annotated[str, typer.Option(help="Other people's kernels beside it: all, none or names.")] = "all",
    shapes: Annotated[
        str,
        typer.Option(
            help="default, or a JSON file: a list of objects with name, kind (decode, ragged, verify, prefill), width, "
            "live (a list, or one length with rows), share (rows that read the same pages), options (of the problem: "
            "heads, extra_width, ...) and cached (inputs stay in L2)."
        ),
    ] = "default",
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Also write the JSON to this file.")] = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Time the tuned entries, the defaults and every installed peer on the same tensors, on the GPU here.

    Entries come from --db where it is given, else from the shipped ones.
    """
    from dsv4tune.codegen import devices, ops
    from dsv4tune.tools import bench
    from dsv4tune.tools import peers as known
    from dsv4tune.tools.catalogue import write_whole
    from dsv4tune.tuned.store import StoreError

    try:
        op = ops.get(kernel)
        wanted = known.named(kernel, peers)
        chosen = op.bench_shapes() if shapes == "default" else bench.read_shapes(Path(shapes))
        card = devices.here()
        if card is None:
            raise ValueError("bench measures, and there is no GPU here: run it on the machine that serves")
        result = bench.bench(op, card, chosen, wanted, db, say)
        if output is not None:
            write_whole(output, json.dumps(result, indent=1) + "\n")
    except (ValueError, StoreError, OSError) as error:
        fail(error)
    if as_json:
        typer.echo(json.dumps(result))
    else:
        for name, over in bench.ratios(result).items():
            worst = f"worst {over['worst']:.3f} of {over['shapes']} shapes"
            typer.echo(f"tuned over {name}: {over['geometric_mean']:.3f} ({worst})")


@app.command("list")
def list_command(
    kernel: Annotated[str | None, typer.Option(help="Only this kernel.")] = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """List the problems in the database with the best config of each."""
    from dsv4tune.tools import catalogue

    rows = _reading(lambda: catalogue.overview(_db(db), kernel))
    if as_json:
        typer.echo(json.dumps(rows))
        return
    for row in rows:
        best = row["best"]
        over = f"width {row['problem']['range']['width']}"
        typer.echo(f"{row['problem']['key']}, {over}: {sum(row['trials'].values())} trials")
        typer.echo(f"  {_line(best)}" if best else "  nothing usable")


@app.command("show")
def show_command(
    kernel: Annotated[str, typer.Option(help="Kernel of the problem.")],
    rows: Annotated[int, typer.Option(help="Rows of the problem.")],
    target: Annotated[str | None, typer.Option(help="Only this compute capability, such as sm_120.")] = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Show the best config of a problem: its words, resources, evidence and rendered source."""
    from dsv4tune.tools import catalogue

    found = _reading(lambda: catalogue.details(_db(db), kernel, rows, target))
    if as_json:
        typer.echo(json.dumps(found[0] if len(found) == 1 else {"results": found}))
        return
    for one in found:
        typer.echo(f"{one['problem']['key']}, width {one['problem']['range']['width']}")
        typer.echo(f"  {_figures(one)}")
        for word, value in one["config"].items():
            if value not in (0, "auto"):
                typer.echo(f"    {word:16} {value:8} {one['words'].get(word, '')}")
        typer.echo(f"  error {one['error']:.1e} against float64, checked by {one['checked_by']}")
        r = one["resources"]
        typer.echo(
            f"  {r['registers']} registers, {r['spill_bytes']} B spilled, {r['shared_bytes']} B shared, {r['mma']}"
            + (f", {r['async_copy']}" if r["async_copy"] else "")
        )
        e = one["environment"]
        typer.echo(f"  dsv4tune {e['dsv4tune']}, Triton {e['triton']}, ptxas {e['ptxas']}, torch {e['torch']}")
        note = "" if one["source_is_current"] else " (not the text that was tried: this dsv4tune renders another)"
        for warning in one["warnings"]:
            typer.echo(f"  warning: {warning}")
        typer.echo(f"  source {one['source']}{note}")


@app.command("export")
def export_command(
    output: Annotated[Path | None, typer.Option("-o", "--output", help="File to write [default: stdout]")] = None,
    kernel: Annotated[str | None, typer.Option(help="Only this kernel.")] = None,
    db: Db = None,
) -> None:
    """Write the best entries as reviewable JSON; the same database gives the same bytes."""
    from dsv4tune.tools import catalogue

    text, left_out = _reading(lambda: catalogue.export(_db(db), kernel))
    for line in left_out:
        say(line)
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        catalogue.write_whole(output, text)
    except OSError as error:
        fail(f"can't write {output} ({error.strerror or error}): choose another file with -o")


@app.command("emulate")
def emulate_command(
    target: Annotated[str, typer.Option(help="Compute capability whose code is run, such as sm_120.")],
    kernel: Annotated[str, typer.Option(help="Kernel to check: indexer or mla_decode.")] = "indexer",
    rows: Annotated[str, typer.Option(help="Query rows of the default configs: 64, or a list.")] = "1,16,64",
    heads: Heads = None,
    tp: Tp = None,
    cache: Cache = None,
    db: Annotated[Path | None, typer.Option("--db", help="Check this database's best configs too.")] = None,
    keep: Annotated[
        Path | None, typer.Option(help="Database for what was right, as predicted entries that name this check.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check the code that another architecture gets by running it on the sm_90 GPU here.

    Shows that its schedule, addressing and synchronisation are right; says nothing of its speed there.

    Exit status: 0 all right, 1 one is wrong or can't be run this way, 2 without an sm_90 GPU or for bad input.
    """
    from dsv4tune.codegen import devices, ops
    from dsv4tune.tools import emulate
    from dsv4tune.tuned.store import Store, StoreError

    try:
        device = devices.named(target=target)
        wanted = emulate.candidates(ops.get(kernel), device, _rows(rows), db, _given(heads=heads, tp=tp, cache=cache))
        card = emulate.hopper_here()
        say(f"running {device.silicon.target} code on {card.name} ({card.silicon.target})")
        kept = Store(keep) if keep is not None else None
    except (ValueError, StoreError, OSError) as error:
        fail(error)
    results = []
    for result in emulate.emulate_all(wanted):
        results.append(result)
        trial = result.trial(device)
        if kept is not None and trial is not None:
            kept.add(trial)
        if not as_json:
            typer.echo(str(result))
    if as_json:
        typer.echo(json.dumps({"results": [result.to_json() for result in results]}))
    if any(result.status != "ok" for result in results):
        raise typer.Exit(1)


Context = Annotated[str, typer.Option(help="Context length of the server, in tokens.")]
Drafts = Annotated[int, typer.Option(min=0, help="Draft tokens of a request when verifying; --rows counts them.")]
ServedRows = Annotated[
    str, typer.Option(help="Query rows of a call: 64, a list 1,16,64, or 'captured' for SGLang's graph sizes.")
]
ServedTp = Annotated[int, typer.Option(min=1, help="Ranks that share the model's 64 query heads.")]
Chunk = Annotated[int, typer.Option(min=0, help="Rows of a prefill chunk, 0 for none.")]
TopK = Annotated[int, typer.Option(help="Entries that the indexer selects: 512 (Flash) or 1024 (Pro).")]
Policy = Annotated[str, typer.Option(help="Evidence that an entry needs: measured, strict or predicted.")]
OneKernel = Annotated[str | None, typer.Option(help="Only this kernel: indexer or mla_decode.")]
Target = Annotated[str | None, typer.Option(help="Compute capability, such as sm_120; needs no GPU.")]
Card = Annotated[str | None, typer.Option(help="Card, such as rtx-pro-6000; needs no GPU.")]


@app.command("explain")
def explain_command(
    rows: ServedRows = "64",
    tp: ServedTp = 8,
    context: Context = "1048576",
    draft_tokens: Drafts = 0,
    topk: TopK = 512,
    chunk: Chunk = 0,
    kernel: OneKernel = None,
    target: Target = None,
    device: Card = None,
    policy: Policy = "measured",
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Say which entry a server of these arguments would choose for each call, and why; needs no server.

    Exit status: 0 also where the server's own kernels would stay, 2 for bad input.
    """
    from dsv4tune.tools import explain

    given = (rows, tp, context, draft_tokens, topk, chunk, kernel, target, device, policy, db)
    found = _reading(lambda: explain.explain(_served(*given), say))
    if as_json:
        typer.echo(json.dumps({"results": found}))
        return
    for one in found:
        chosen = one["chosen"]
        typer.echo(f"{one['problem']['key']}, {one['width'] or 'any'} columns")
        if chosen is None:
            typer.echo(f"  the server's own kernel stays: {one['why']}")
        else:
            score = f"{chosen['score']:.3f} of {chosen['yardstick']}"
            typer.echo(f"  {Config(chosen['config']).brief}")
            typer.echo(f"  {chosen['provenance']}: {_times(chosen['times_us'])}; {score}")
            typer.echo(f"  from {chosen['origin']}, {one['why']}")
        for line in one["refused"]:
            typer.echo(f"  refused: {line}")


@app.command("warm")
def warm_command(
    rows: ServedRows = "captured",
    tp: ServedTp = 8,
    context: Context = "1048576",
    draft_tokens: Drafts = 0,
    topk: TopK = 512,
    chunk: Chunk = 0,
    kernel: OneKernel = None,
    target: Target = None,
    device: Card = None,
    policy: Policy = "measured",
    jobs: Annotated[int, typer.Option(min=0, help="Compiler processes, 0 for one a core.")] = 0,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Compile everything that a server of these arguments would choose, so that it starts without compiling.

    Exit status: 0 all compiled, 1 where something could not be, 2 for bad input.
    """
    from dsv4tune.tools import explain

    given = (rows, tp, context, draft_tokens, topk, chunk, kernel, target, device, policy, db)
    done = _reading(lambda: explain.warm(_served(*given), jobs, say))
    if as_json:
        typer.echo(json.dumps(done))
    else:
        for name, why in done["failed"].items():
            say(f"{name}: {why}")
        compiled = done["texts"] - done["known"] - len(done["failed"])
        typer.echo(
            f"{done['with_entry']} of {done['shapes']} call shapes have an entry; of {done['texts']} texts {compiled} "
            f"compiled now and {done['known']} before, in {done['seconds']} s, into {done['cache']}"
        )
    if done["failed"]:
        raise typer.Exit(1)


def _served(
    rows: str,
    tp: int,
    context: str,
    draft_tokens: int,
    topk: int,
    chunk: int,
    kernel: str | None,
    target: str | None,
    device: str | None,
    policy: str,
    db: Path | None,
) -> Any:
    from dsv4tune.codegen import ops
    from dsv4tune.runtime import wanted
    from dsv4tune.tools import explain
    from dsv4tune.tuned.selector import POLICIES

    if policy not in POLICIES:
        raise ValueError(f"--policy takes {', '.join(POLICIES)}, not '{policy}'")
    kernels = list(ops.OPS) if kernel is None else [ops.get(kernel).name]
    counts = None if rows == "captured" else [_number(part, "--rows") for part in rows.split(",")]
    server = wanted.server(_number(context, "--context"), tp, draft_tokens, counts, chunk, topk)
    return explain.Request(server, kernels, explain.card_for(device, target), policy, db)


# -- parsing and printing ---------------------------------------------------------------------------------------


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _db(db: Path | None) -> Path:
    from dsv4tune.tuned.store import default_path

    return db or default_path()


def _reading(read: Any) -> Any:
    from dsv4tune.tuned.store import StoreError

    try:
        return read()
    except (StoreError, ValueError, OSError) as error:
        fail(error)


_UNITS = {"": 1, "k": 1024, "m": 1024**2}


def _number(text: str, option: str) -> int:
    """A count, with 1024-based k and M as context lengths have them."""
    found = re.fullmatch(r"(\d+)([kKmM]?)", text.strip())
    if found is None or int(found[1]) == 0:
        raise ValueError(f"{option} takes whole numbers above 0, such as 131072 or 128k, not '{text}'")
    return int(found[1]) * _UNITS[found[2].lower()]


def _weight(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--weights takes numbers, such as 1,2,0.5, not '{text}'") from None


def _rows(text: str, draft_tokens: int = 0) -> list[int]:
    from dsv4tune.runtime.wanted import CAPTURED, CAPTURED_DRAFTS

    if text == "captured":
        return [size * draft_tokens for size in CAPTURED_DRAFTS] if draft_tokens > 1 else list(CAPTURED)
    return list(dict.fromkeys(_number(part, "--rows") for part in text.split(",")))


def _duration(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h)?", text.strip())
    if found is None:
        raise ValueError(f"--budget takes a time such as 90s, 10m or 1h, not '{text}'")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2] or "s"]


def _summary(result: dict[str, Any]) -> str:
    trials, best = result["trials"], result["best"]
    counts = ", ".join(f"{n} {name}" for name, n in trials.items() if n and name != "total")
    lines = [
        f"{result['problem']['key']}",
        f"  {result['status']}: {result['tried']} tried in {result['seconds']:.1f} s, "
        f"{trials['total']} trials stored{f' ({counts})' if counts else ''}",
    ]
    lines.append(f"  {_line(best)}" if best else "  nothing usable")
    for name, reference in result["references"].items():
        if "missing" not in reference:
            lines.append(f"  {name} ({reference['version']}): {_times(reference['times_us'])}")
    lines.append(f"  stored in {result['db']}")
    return "\n".join(lines)


def _line(best: dict[str, Any]) -> str:
    return f"{_figures(best)}\n  {Config(best['config']).brief}"


def _figures(best: dict[str, Any]) -> str:
    times = best.get("measured_us") or best["predicted_us"]
    return f"{best['provenance']}: {_times(times)}; {best['score']:.3f} of {best['yardstick']}"


def _times(times: dict[Any, float]) -> str:
    return ", ".join(f"{us:.2f} us at {length}" for length, us in times.items())


if __name__ == "__main__":
    app()
