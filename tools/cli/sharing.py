"""Commands between databases: export, import, merge, diff, verify, prune."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from dsv4tune.codegen.words import counted
from dsv4tune.tools.cli.options import (
    AsJson,
    Db,
    OneDevice,
    OneKernel,
    OneTarget,
    Words,
    Yes,
    confirmed,
    database,
    only,
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
                typer.echo(part, nl=False)
        else:
            files.write(output, parts)
            notes.append(f"wrote {output}: {counted(written, 'entry', 'entries')}")
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
                    typer.echo(json.dumps({"imported": False, **asdict(shown)}))
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
                typer.echo(json.dumps({"imported": True, **asdict(done)}))
            else:
                _print(done, "stored now")

    reading(work)


def _print(summary: Summary, verb: str) -> None:
    for line in summary.changes:
        typer.echo(line)
    more = summary.new + summary.better - len(summary.changes)
    if more > 0:
        typer.echo(f"... and {more} more")
    for line in summary.notes:
        say(f"note: {line}")
    typer.echo(
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
        typer.echo(json.dumps(found))
    else:
        for mark, name in (("-", "only_a"), ("+", "only_b")):
            for one in found[name]:
                typer.echo(f"{mark} {one['problem_key']}: {one['figure']}")
        for one in found["changed"]:
            typer.echo(f"~ {one['problem_key']}: {' -> '.join(one['figures'])}; {', '.join(one['fields'])}")
    if any(found.values()):
        raise typer.Exit(1)


def verify_command(
    file: Annotated[
        str | None, typer.Argument(help="Exported file, folder or URL [default: what the database would choose]")
    ] = None,
    kernel: OneKernel = None,
    problem: Words = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Compile, check and time entries again on the GPU here.

    What holds is stored as measured here. Entries of other silicon are left out. One that is wrong here is not followed
    any more; it stays in the history.

    Exit status: 0 all that could be tried hold, 1 one doesn't, 2 without a GPU or for bad input.
    """
    from dsv4tune.tools import verify

    results = reading(lambda: verify.verify(file, database(db), only(kernel, None, None, problem), say))
    if as_json:
        typer.echo(json.dumps({"results": [asdict(result) for result in results]}))
    else:
        for result in results:
            typer.echo(str(result))
    if any(result.status != "ok" for result in results):
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
        typer.echo(
            f"{len(losers)} of {store.total()} trials in {store.path} ended {older_than} days ago or earlier and win "
            "nothing"
        )
        if losers and confirmed("Delete them?", yes):
            store.delete(losers)
            typer.echo(f"deleted {len(losers)}")
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
