"""Commands between databases: export, import, merge, diff, verify, prune."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from dsv4tune.codegen.words import counted
from dsv4tune.tools.cli.options import (
    AsJson,
    Budget,
    Db,
    OneDevice,
    OneKernel,
    OneTarget,
    Quiet,
    Words,
    Yes,
    confirmed,
    database,
    echo,
    only,
    read_duration,
    reading,
    say,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dsv4tune.tuned.records import Entry
    from dsv4tune.tuned.share import Summary

Place = Annotated[str, typer.Argument(help="An exported file, a folder of them, any fsspec URL, or - for stdin.")]


def export_command(
    output: Annotated[
        str | None, typer.Option("-o", "--output", help="File or fsspec URL to write [default: stdout]")
    ] = None,
    kernel: OneKernel = None,
    device: OneDevice = None,
    target: OneTarget = None,
    problem: Words = None,
    db: Db = None,
) -> None:
    """Write the best entries as reviewable JSON.

    The same database gives the same bytes.

    Exit status: 0, or 2 where the database can't be read or the file not be written.
    """
    from dsv4tune.tuned import files, share
    from dsv4tune.tuned.store import Store

    def work() -> list[str]:
        notes: list[str] = []
        written = 0

        def entries() -> Iterator[Entry]:
            nonlocal written
            for entry in share.exported(store, only(kernel, device, target, problem), notes):
                written += 1
                yield entry

        store = Store(database(db), create=False)
        parts = files.text_of(entries())
        if output is None:
            for part in parts:
                echo(part, nl=False)
        else:
            files.write(output, parts)
            notes.append(f"wrote {output}: {counted(written, 'entry', 'entries')}")
            if not written:
                notes.append(f"nothing of that kind in {store.path}; `dsv4tune list` tells what it holds")
        return notes

    for line in reading(work):
        say(line)


def import_command(
    place: Place,
    kernel: OneKernel = None,
    device: OneDevice = None,
    target: OneTarget = None,
    problem: Words = None,
    yes: Yes = False,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Take entries from elsewhere, after a summary.

    It says what would change; then, with your word, all is done in one transaction. A file is taken whole or not at
    all. Better evidence wins (measured here, on the same silicon with the same Triton, with another, predicted), then
    the faster; what was there stays.

    Exit status: 0 imported or only shown, 2 refused, and nothing changed.
    """
    from dsv4tune.tuned import files, share
    from dsv4tune.tuned.store import Store

    def work() -> None:
        path, wanted = database(db), only(kernel, device, target, problem)
        with files.opened(place) as sources:
            if not yes:
                store = Store(path, create=False) if path.exists() else None
                shown = share.survey(sources, store, wanted)
                if store is not None:
                    store.close()
                if as_json:
                    echo(json.dumps({"imported": False, **asdict(shown)}))
                else:
                    _print(shown, "would be stored")
                if not confirmed(f"Import {shown.stored} into {path}?", yes):
                    return
            store = Store(path)
            for note in store.notes:
                say(note)
            done = share.bring_in(sources, store, wanted)
            store.close()
            if as_json:
                echo(json.dumps({"imported": True, **asdict(done)}))
            else:
                _print(done, "stored now")

    reading(work)


def _print(summary: Summary, verb: str) -> None:
    for line in summary.changes:
        echo(line)
    more = summary.new + summary.better - len(summary.changes)
    if more > 0:
        echo(f"... and {more} more")
    for line in summary.notes:
        say(f"note: {line}")
    echo(
        f"{counted(len(summary.files), 'file')}: {counted(summary.stored, 'entry', 'entries')} {verb}: "
        f"{summary.new} new, {summary.better} better than what is here, {summary.kept} for the history; "
        f"{summary.known} known already"
    )


def merge_command(
    places: Annotated[list[str], typer.Argument(help="Exported files, folders, URLs or databases.")],
    output: Annotated[str, typer.Option("-o", "--output", help="File or fsspec URL to write.")],
) -> None:
    """Make one file of several.

    It has, for each problem, the entry with the better evidence, then the faster.

    Exit status: 0, or 2 where something is refused or can't be written.
    """
    from dsv4tune.tuned import files, share

    lost: list[str] = []
    entries = reading(lambda: share.merged(places, lost))
    reading(lambda: files.write(output, files.text_of(entries)))
    for line in [*lost, f"wrote {output}: {counted(len(entries), 'entry', 'entries')}"]:
        say(line)


def diff_command(
    a: Annotated[str, typer.Argument(help="An exported file, folder, URL or database.")],
    b: Annotated[str, typer.Argument(help="Another one.")],
    as_json: AsJson = False,
) -> None:
    """Compare the best entries of two files.

    Exit status: 0 the same, 1 they differ, 2 for bad input.
    """
    from dsv4tune.tuned import share

    found = reading(lambda: share.difference(a, b))
    if as_json:
        echo(json.dumps(found))
    else:
        for mark, name in (("-", "only_a"), ("+", "only_b")):
            for one in found[name]:
                echo(f"{mark} {one['problem_key']}: {one['figure']}")
        for one in found["changed"]:
            echo(f"~ {one['problem_key']}: {' -> '.join(one['figures'])}; {', '.join(one['fields'])}")
    if any(found.values()):
        raise typer.Exit(1)


def verify_command(
    file: Annotated[
        str | None, typer.Argument(help="Exported file, folder or URL [default: what the database would choose]")
    ] = None,
    kernel: OneKernel = None,
    problem: Words = None,
    again: Annotated[bool, typer.Option(help="Measure those too that were found right here before.")] = False,
    budget: Budget = None,
    db: Db = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Compile, check and time entries again on the GPU here.

    What holds is stored as measured here. Entries of other silicon are left out. One that is wrong here is not followed
    any more; it stays in the history.

    Each is told and stored when it ends: after --budget or Ctrl-C the same command goes on with those that are left.
    What this database's own runs found right, with the kernel's present source, over the entry's range and by the
    Triton that runs here, is told and not measured again. --again measures all anew, as after a new driver or once the
    server's kernel is installed.

    Exit status: 0 all hold, 1 one doesn't, could not be tried or was not come to, 2 without a GPU or for bad input.
    """
    from dsv4tune.tools import progress, verify

    def work() -> verify.Outcome:
        request = verify.Request(
            place=file,
            db=database(db),
            only=only(kernel, None, None, problem),
            again=again,
            budget_s=None if budget is None else read_duration(budget),
        )
        with progress.watching(quiet, say) as watch:
            return verify.verify(request, watch, lambda result: watch.say(str(result)) if as_json else tell(result))

    def tell(result: verify.Verified) -> None:
        echo(str(result))

    outcome = reading(work)
    if as_json:
        echo(json.dumps(asdict(outcome)))
    elif outcome.status != "complete":
        done = f"{len(outcome.results)} of {counted(outcome.entries, 'entry', 'entries')} done"
        rest = "the same command goes on with the others"
        if again:
            rest = "without --again the same command leaves out what was found right"
        echo(f"{outcome.status}: {done}; {rest}")
    if not outcome.holds:
        raise typer.Exit(1)


def prune_command(
    older_than: Annotated[int, typer.Option(min=0, help="Days since a trial ended.")] = 90,
    kernel: OneKernel = None,
    device: OneDevice = None,
    target: OneTarget = None,
    problem: Words = None,
    yes: Yes = False,
    db: Db = None,
) -> None:
    """Delete old trials, never winners, and give the space back.

    A winner is the best of its problem, range, environment and kind of evidence, and any trial whose config is such a
    best for other rows of the problem.

    Exit status: 0 deleted or only shown, 2 where the database can't be written.
    """
    from dsv4tune.tuned.store import Store

    def work() -> None:
        if not database(db).is_file():
            Store(database(db), create=False)
        store = Store(database(db))
        wanted = only(kernel, device, target, problem)
        losers = store.losers(wanted, older_than)
        echo(
            f"{len(losers)} of {store.total()} trials in {store.path} ended {older_than} days ago or earlier and win "
            "nothing"
        )
        if losers and confirmed("Delete them?", yes):
            store.delete(losers)
            echo(f"deleted {len(losers)}")
        store.close()

    reading(work)


COMMANDS = {
    "export": export_command,
    "import": import_command,
    "merge": merge_command,
    "diff": diff_command,
    "verify": verify_command,
    "prune": prune_command,
}
