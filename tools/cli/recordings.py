"""Commands around recordings of whole spaces: record, replay, fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dsv4tune.tools.cli.options import (
    AsJson,
    Budget,
    Cache,
    Context,
    Drafts,
    Gpus,
    Heads,
    HowMuch,
    Jobs,
    ModelName,
    NamedKernel,
    OneTp,
    Quiet,
    Sampler,
    devices,
    echo,
    fail,
    given_options,
    read_context,
    read_duration,
    read_model,
    reading,
    say,
    targets,
)


def record_command(
    kernel: NamedKernel,
    rows: Annotated[int, typer.Option(help="Query rows of a call.")] = 64,
    target: Annotated[
        str | None,
        typer.Option(autocompletion=targets, help="Compute capability that the GPU here must have, such as sm_90."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(autocompletion=devices, help="Card that the GPU here must be, such as h200.")
    ] = None,
    context: Context = None,
    draft_tokens: Drafts = None,
    heads: Heads = None,
    model: ModelName = None,
    tp: OneTp = None,
    cache: Cache = None,
    passes: Annotated[int, typer.Option(min=1, help="How often each usable config is measured.")] = 2,
    budget: Budget = None,
    jobs: Jobs = None,
    gpus: Gpus = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="File to write or to go on with [default: named after the problem]"),
    ] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Measure every valid config of one problem into one file.

    On the GPU here. The file holds all rounds of every config and of the server's kernel beside it, and needs no GPU to
    be read. Configs of one machine code and launch plan are measured once. Each config is kept when it ends: after
    --budget, Ctrl-C or a crash, the same command goes on from there. A second pass measures all again in reverse order.

    Exit status: 0 with a best config, also when --budget or Ctrl-C ended it; 1 where no config is usable; 2 without
    such a GPU, for a file of something else, or for bad input.
    """
    from dsv4tune.codegen import ops
    from dsv4tune.tools import progress, record, tune
    from dsv4tune.tools.sites import Local

    try:
        if rows < 1:
            raise ValueError(f"--rows must be at least 1, not {rows}")
        site = Local(gpus)
        card, on_gpu = tune.choose_device(device, target, site)
        request = record.Request(
            kernel=ops.get(kernel).name,
            rows=rows,
            max_context=read_context(context),
            draft_tokens=draft_tokens or 0,
            options=given_options(heads=heads, tp=tp, cache=cache, model=read_model(model)),
            device=card,
            on_gpu=on_gpu,
            passes=passes,
            budget_s=None if budget is None else read_duration(budget, "--budget"),
            jobs=jobs,
            file=output,
            site=site,
        )
        with progress.watching(quiet, say) as watch:
            result = record.record(request, watch)
    except (ValueError, OSError) as error:
        fail(error)
    echo(json.dumps(result) if as_json else record.in_words(result))
    if result["best"] is None:
        raise typer.Exit(1)


def replay_command(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Recordings of `dsv4tune record`.")],
    sampler: Annotated[Sampler, typer.Option(help="How candidates are proposed.")] = Sampler.guided,
    repeats: Annotated[int, typer.Option(min=1, help="Searches, with seeds 0, 1, 2, ...")] = 50,
    in_flight: Annotated[
        int, typer.Option(min=1, help="Candidates under way at once; a search has two for each core.")
    ] = 1,
    effort: Annotated[
        HowMuch | None, typer.Option(help="Replay whole searches of this effort too, the final with them.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run searches on recorded spaces, without a GPU.

    Candidates have the times that were recorded, noise included. Tells how near to the best config a sampler is after
    1, 5, 10 and 20 % of the space, and after how many it is within 3 % of it. Neither the default config nor anything
    else is given to it. With --effort also how searches as `dsv4tune search` makes them end, and whether they agree.

    Exit status: 0, or 2 for a file that is no recording of a whole space.
    """
    from dsv4tune.tools import efforts, recording, replay

    results = []
    try:
        for file in files:
            found = replay.Replay(recording.read(file))
            result = {"file": str(file), **replay.figures(found, sampler.value, repeats, in_flight)}
            if effort is not None:
                spent = efforts.named(effort.value)
                result["searches"] = {
                    "effort": effort.value,
                    **replay.agreement(found, sampler.value, spent, repeats, in_flight),
                }
            results.append(result)
            if not as_json:
                echo(replay.in_words(result))
    except (ValueError, OSError) as error:
        fail(error)
    if as_json:
        echo(json.dumps(results[0] if len(results) == 1 else {"results": results}))


def fit_command(
    recordings: Annotated[list[Path], typer.Argument(metavar="RECORDING...", help="Files of whole spaces.")],
    trials: Annotated[
        list[Path] | None,
        typer.Option("--trials-file", help="Also fit to measured trials, JSON lines; may be given again."),
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the cost model to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Fit the cost model to recordings, and say how well it ranks.

    Each recording is judged by two fits, to the other recordings and to the trials of other problems too; neither has
    seen anything of its problem. The model is then fitted to everything. DSV4TUNE_COST_MODEL names a file to use.

    Exit status: 0 fitted, 2 for bad input or without scipy.
    """
    from dsv4tune.tuned.files import write_whole

    try:
        from dsv4tune.tools import fit
    except ModuleNotFoundError as error:
        fail(f"a fit needs {error.name}, which is not installed: pip install scipy")

    def run() -> fit.Result:
        searched = [times for path in trials or () for times in fit.trials(path)]
        result = fit.fit_all([fit.recorded(path) for path in recordings], searched)
        if output is not None:
            write_whole(output, [json.dumps(result.model.to_json(), indent=1) + "\n"])
        return result

    result = reading(run)
    if as_json:
        echo(json.dumps(result.to_json()))
        return
    for line in fit.table(result):
        echo(line)
    if output is not None:
        echo(f"wrote {output}")


COMMANDS = {"record": record_command, "replay": replay_command, "fit": fit_command}
