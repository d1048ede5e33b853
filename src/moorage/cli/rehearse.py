"""`moorage rehearse`: prove on a job of one's own that checkpoints and restores do not change what it computes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moorage.cli.options import DryRun, Output, client, output_format
from moorage.cli.output import message_fields, progress, remark, write
from moorage.errors import Differs


def rehearse(
    file: Annotated[Path, typer.Argument(metavar="JOB-SPEC", help="A job file with a section `rehearse`.")],
    to: Annotated[Path, typer.Option("--to", help="Folder for both runs and the report.")] = Path("rehearsal"),
    seed: Annotated[int | None, typer.Option(help="Of the instants (default: as the file says).")] = None,
    checkpoints: Annotated[int | None, typer.Option(help="How many.")] = None,
    restores: Annotated[int | None, typer.Option(help="How many.")] = None,
    dry_run: DryRun = False,
    output: Output = None,
) -> None:
    """Run a job undisturbed and with checkpoints and restores, and compare; exit code 217 if it differs."""
    import msgspec

    from moorage.cli.job_file import checked, read_mapping, spec_of
    from moorage.rehearse import report, schedule
    from moorage.rehearse.run import rehearse as carry_out
    from moorage.rehearse.spec import read

    form = output_format(output)
    fields, plan = read(file, read_mapping(file))
    asked = {"seed": seed, "checkpoints": checkpoints, "restores": restores}
    plan = msgspec.structs.replace(plan, **{name: value for name, value in asked.items() if value is not None})
    template = fields.pop("working_directory", None)
    spec = spec_of({"name": file.stem, **checked(fields, file)})
    if dry_run:
        return write({"job": message_fields(spec), "would": schedule.disturbances(plan)}, form)
    folder = to.absolute()
    with client() as api, progress(f"rehearsal of {spec.name}") as update:

        def say(text: str) -> None:
            update(text, None)
            remark(text)

        found = carry_out(api, spec, plan, folder, say=say, template=Path(template) if template else None)
    if form == "table":
        print(report.table(found), flush=True)
    else:
        write(found, form)
    remark(f"report: {folder / 'report.json'}, plot: {folder / 'report.svg'}")
    if not found.equal:
        raise Differs(f"job {spec.name} differs after restores: {found.first}", found.when)
    if not found.proved:
        raise Differs(
            f"job {spec.name} was not restored: nothing is proved", "make it run longer, or take another --seed"
        )
