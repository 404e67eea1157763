"""Commands that make and time kernels: search, bench, emulate."""

from __future__ import annotations

import json
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsv4tune.tools.cli.options import (
    AsJson,
    Budget,
    Cache,
    Card,
    Context,
    Db,
    Drafts,
    GpuMemory,
    Gpus,
    Heads,
    HowMuch,
    Jobs,
    Like,
    ModelName,
    NamedKernel,
    OneKernel,
    OneTp,
    Quiet,
    Rows,
    Sampler,
    Target,
    echo,
    fail,
    given_options,
    read_context,
    read_count,
    read_duration,
    read_like,
    read_memory,
    read_model,
    read_rows,
    read_weight,
    refuse_memory,
    say,
    summary,
    targets,
)

if TYPE_CHECKING:
    from dsv4tune.tools.sites import Site


class Where(str, Enum):
    local = "local"
    ray = "ray"


def _site(executor: Where, gpus: str | None) -> Site:
    """Where a search runs.

    Raises:
        ValueError: GPUs that are not here, or no cluster that can be used.
    """
    from dsv4tune.tools.sites import Local

    if executor is Where.local:
        return Local(gpus)
    if gpus is not None:
        raise ValueError("--gpus names GPUs of this machine: with --executor ray name a --device instead")
    from dsv4tune.tools.ray_pool import RayCluster

    return RayCluster(say)


def search_command(
    kernel: OneKernel = None,
    like: Like = None,
    gpu_memory: GpuMemory = None,
    target: Target = None,
    device: Card = None,
    rows: Rows = None,
    context: Context = None,
    draft_tokens: Drafts = None,
    heads: Heads = None,
    model: ModelName = None,
    tp: OneTp = None,
    cache: Cache = None,
    lengths: Annotated[str | None, typer.Option(help="Live lengths to score over, such as 128,2048.")] = None,
    weights: Annotated[str | None, typer.Option(help="What each length counts, such as 1,2.")] = None,
    effort: Annotated[HowMuch, typer.Option(help="How many candidates, and how long the final is.")] = HowMuch.normal,
    trials: Annotated[
        int | None,
        typer.Option(
            help="Candidates for a problem, those of earlier runs included, however little they gain. "
            "[default: by --effort, fewer where nothing improves]"
        ),
    ] = None,
    budget: Budget = None,
    sampler: Annotated[Sampler, typer.Option(help="How candidates are proposed.")] = Sampler.guided,
    seed: Annotated[int, typer.Option(help="Of the sampler and the inputs.")] = 0,
    jobs: Jobs = None,
    gpus: Gpus = None,
    executor: Annotated[
        Where, typer.Option(help="Where processes run: this machine, or the Ray cluster of $RAY_ADDRESS.")
    ] = Where.local,
    db: Db = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Search for the fastest config of a kernel, and keep it.

    Measures on the GPU here; without one (or for another card) it compiles, checks through Triton's interpreter and
    predicts. Stops when nothing improves, at --trials, --budget or Ctrl-C, and goes on from there when run again. On a
    GPU the best ones are then timed again in turn with the server's kernel: only what is faster by 3 % stands for it.

    With several GPUs each candidate is timed in turn with the baseline on one of them, and only GPUs of one silicon
    take part. With --executor ray, those of a cluster do; its machines need the same dsv4tune, Triton and torch.

    With --like it tunes what that server will capture: every kernel unless --kernel names one, and of the captured row
    counts few that enclose the others, or all of them with --rows captured.

    The budget is shared evenly by all problems, 20 s each at the least as long as it lasts. Lengths and widths count
    cached entries, one for 4 tokens of context.

    Exit status: 0 with a best config for every row count, 1 where one has none, 2 for bad input.
    """
    from dsv4tune.codegen import ops
    from dsv4tune.tools import efforts, progress, tune
    from dsv4tune.tuned import store

    try:
        if kernel is None and like is None:
            raise ValueError("name a kernel with --kernel, or the server to tune for with --like")
        kernels = list(ops.OPS) if kernel is None else [ops.get(kernel).name]
        spent = efforts.named(effort.value)
        if trials is not None:
            spent = replace(spent, trials=trials, patience=None)
        if spent.trials < 1:
            raise ValueError(f"--trials must be at least 1, not {trials}")
        site = _site(executor, gpus)
        card, on_gpu = tune.choose_device(device, target, site)
        if weights is not None and lengths is None:
            raise ValueError("--weights goes with --lengths: name both")
        tokens, drafts, counts = read_context(context), draft_tokens or 0, []
        if like is None:
            refuse_memory(gpu_memory)
            counts = read_rows(rows or "64", drafts)
            options = given_options(heads=heads, tp=tp, cache=cache, model=read_model(model))
            wanted = [(name, options) for name in kernels]
        else:
            said = {"context": context, "tp": tp, "draft_tokens": draft_tokens, "heads": heads, "cache": cache}
            tell = (lambda line: None) if quiet else say
            start = read_like(lambda: card, like, read_memory(gpu_memory), tell, model=model, **said)
            tokens, drafts, wanted = start.context, start.draft_tokens, start.problems(kernels)
            counts = list(start.rows) if rows == "captured" else read_rows(rows) if rows else start.rows_to_search(card)
        requests = [
            tune.Request(
                kernel=name,
                rows=counts,
                max_context=tokens,
                draft_tokens=drafts,
                options=options,
                device=card,
                on_gpu=on_gpu,
                effort=spent,
                budget_s=None if budget is None else read_duration(budget, "--budget"),
                seed=seed,
                sampler=sampler.value,
                jobs=jobs,
                db=db or store.default_path(),
                lengths=None if lengths is None else [read_count(n, "--lengths") for n in lengths.split(",")],
                weights=None if weights is None else [read_weight(w) for w in weights.split(",")],
                site=site,
            )
            for name, options in wanted
        ]
        with progress.watching(quiet, say) as watch:
            results = tune.tune_all(requests, watch)
    except (ValueError, store.StoreError, OSError) as error:
        fail(error)
    if as_json:
        echo(json.dumps(results[0] if len(counts) * len(requests) == 1 else {"results": results}))
    else:
        # Those that the search did not come to, and of which nothing is known, are counted.
        begun = [result for result in results if result["seconds"] or result["best"] is not None]
        for result in begun:
            echo(summary(result))
        if rest := len(results) - len(begun):
            status = results[-1]["status"]
            echo(f"{status}: {rest} of {len(results)} problems not begun; the same command goes on with them")
    if any(result["best"] is None for result in results):
        raise typer.Exit(1)


def bench_command(
    kernel: NamedKernel,
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
    """Time tuned entries, defaults and installed peers side by side.

    All on the same tensors, on the GPU here. Entries come from --db where it is given, else from the shipped ones.

    Exit status: 0 all timed, 1 where a shape gave no times, 2 without a GPU or for bad input.
    """
    from dsv4tune.codegen import devices, ops
    from dsv4tune.tools import bench
    from dsv4tune.tools import peers as known
    from dsv4tune.tuned.files import write_whole
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
            write_whole(output, [json.dumps(result, indent=1) + "\n"])
    except (ValueError, StoreError, OSError) as error:
        fail(error)
    if as_json:
        echo(json.dumps(result))
    else:
        for name, over in bench.ratios(result).items():
            worst = f"worst {over['worst']:.3f} of {over['shapes']} shapes"
            echo(f"tuned over {name}: {over['geometric_mean']:.3f} ({worst})")
    if len(result["rows"]) < len(chosen):
        raise typer.Exit(1)


def emulate_command(
    target: Annotated[
        str,
        typer.Option(autocompletion=targets, help="Compute capability whose code is run, such as sm_120."),
    ],
    kernel: NamedKernel = "indexer",
    rows: Rows = "1,16,64",
    heads: Heads = None,
    model: ModelName = None,
    tp: OneTp = None,
    cache: Cache = None,
    db: Annotated[Path | None, typer.Option("--db", help="Check this database's best configs too.")] = None,
    keep: Annotated[
        Path | None, typer.Option(help="Database for what was right, as predicted entries that name this check.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run another architecture's code on the sm_90 GPU here.

    Checks it against float64. Shows that its schedule, addressing and synchronisation are right; says nothing of its
    speed there.

    Exit status: 0 all right, 1 one is wrong or can't be run this way, 2 without an sm_90 GPU or for bad input.
    """
    from dsv4tune.codegen import devices, ops
    from dsv4tune.tools import emulate
    from dsv4tune.tuned.store import Store, StoreError

    try:
        device = devices.named(target=target)
        options = given_options(heads=heads, tp=tp, cache=cache, model=read_model(model))
        wanted = emulate.candidates(ops.get(kernel), device, read_rows(rows or "1,16,64"), db, options)
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
            echo(str(result))
    if as_json:
        echo(json.dumps({"results": [result.to_json() for result in results]}))
    if any(result.status != "ok" for result in results):
        raise typer.Exit(1)


COMMANDS = {"search": search_command, "bench": bench_command, "emulate": emulate_command}
