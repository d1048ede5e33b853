"""The command `moorage`. Errors become one line and an exit code of the table in docs/exit-codes.md."""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated, Any, NoReturn

import typer
import typer.core

from moorage import __version__
from moorage.cli import certs, checkpoints, cluster, compat, fleet, jobs, launch, node, rehearse, store, top, torchrun
from moorage.cli.options import config_file, global_flags
from moorage.errors import MoorageError, UsageError, of_os_error

#: Why a file or device takes no output.
_NOT_WRITTEN = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


class _ReaderGone(Exception):
    """Whoever read our output went away."""


class _Commands(typer.core.TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        # Left as it is, the parser would take it for a failure of the command and exit with 1.
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise _ReaderGone from error


app = typer.Typer(
    name="moorage",
    cls=_Commands,
    help="Freeze a running distributed job at one consistent instant, save it, and bring it back on other hardware.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
dev = typer.Typer(help="A whole cluster on this machine, to try moorage and to test with.", no_args_is_help=True)
runtime = typer.Typer(help="The programs that moorage stands on: CRIU, runc, etcd.", no_args_is_help=True)
app.add_typer(dev, name="dev")
app.add_typer(runtime, name="runtime")
certificates = typer.Typer(
    help="The cluster's private authority: who may speak to it, and as what.", no_args_is_help=True
)
machines = typer.Typer(help="Machines that join and leave the cluster.", no_args_is_help=True)
app.add_typer(certificates, name="certs")
app.add_typer(machines, name="node")
stores = typer.Typer(help="The keys of encrypted stores.", no_args_is_help=True)
app.add_typer(stores, name="store")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"moorage {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    coordinator: Annotated[str | None, typer.Option(metavar="HOST:PORT[,...]", help="The coordinators.")] = None,
    config: Annotated[str | None, typer.Option(metavar="FILE", help="The one configuration file to read.")] = None,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    global_flags["coordinator"] = coordinator
    config_file[0] = config


_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

for _command in (
    launch.run,
    jobs.checkpoint,
    jobs.park,
    jobs.restore,
    jobs.move,
    jobs.stop,
    jobs.delete,
    jobs.wait,
    jobs.jobs,
    jobs.show,
    jobs.events,
    jobs.logs,
    jobs.pull,
    cluster.nodes,
    fleet.cordon,
    fleet.uncordon,
    fleet.drain,
    top.top,
    checkpoints.checkpoints,
    checkpoints.inspect,
    checkpoints.check,
    checkpoints.prune,
    checkpoints.pin,
    checkpoints.unpin,
    compat.compat,
    rehearse.rehearse,
    cluster.status,
    cluster.doctor,
    cluster.coordinator,
    cluster.worker,
):
    app.command()(_command)
app.command(name="undrain", hidden=True)(fleet.uncordon)
app.command(name="ps", hidden=True)(jobs.jobs)
app.command(name="exec")(jobs.exec_)
app.command(name="torchrun", context_settings=_PASS_ON)(torchrun.torchrun)
for _dev_command in (cluster.up, cluster.down, cluster.destroy, cluster.add):
    dev.command()(_dev_command)
runtime.command(name="install")(cluster.install)
for _certs_command in (certs.create, certs.issue, certs.rotate, certs.revoke):
    certificates.command()(_certs_command)
certificates.command(name="list")(certs.list_)
for _node_command in (node.token, node.join, node.leave, node.remove, node.show):
    machines.command()(_node_command)
for _store_command in (store.new_key, store.rotate_key, store.rebuild_index):
    stores.command()(_store_command)


def _open_closed() -> None:
    """Give the standard streams that the caller closed (``>&-``) to nobody, before a file of ours gets their number."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, number)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
            if null != number:
                os.close(null)


def _end(error: MoorageError) -> NoReturn:
    sys.stderr.write(f"moorage: {error.message}\n")
    if error.hint:
        sys.stderr.write(f"  {error.hint}\n")
    sys.exit(error.exit_code)


def main(arguments: list[str] | None = None) -> Any:
    """Run the command and exit."""
    _open_closed()
    try:
        # Not standalone: a mistake in the command line must end with moorage's own code, not with a job's (2).
        code = app(args=arguments, prog_name="moorage", standalone_mode=False)
        sys.stdout.flush()
        sys.exit(code if isinstance(code, int) else 0)
    except MoorageError as error:
        _end(error)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except (BrokenPipeError, _ReaderGone):
        # The reader of our output went away (`moorage events X | head`): nothing to say, and nowhere to say it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        if error.filename is not None:
            _end(of_os_error(error))
        if error.errno not in _NOT_WRITTEN:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.stderr.write(f"moorage: the output cannot be written: {error.strerror}\n")
        sys.exit(MoorageError.exit_code)
    except Exception as error:
        # The parser's own errors: their class is click's or typer's copy of click, depending on typer's release.
        describe = getattr(error, "format_message", None)
        if describe is None:
            raise
        if message := describe():
            sys.stderr.write(f"moorage: {message}\n")
        if context := getattr(error, "ctx", None):
            sys.stderr.write(f"  `{context.command_path} --help` says more\n")
        sys.exit(UsageError.exit_code)


if __name__ == "__main__":
    main()
