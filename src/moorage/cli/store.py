"""The store itself: its index, keys of encrypted ones. Works without a coordinator."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moorage.cli.options import DryRun, Output, local_output_format
from moorage.cli.output import remark, write
from moorage.errors import Conflict, NotFound, UsageError

if TYPE_CHECKING:
    from moorage.store_settings import StoreSettings


def new_key(file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that does not exist yet.")]) -> None:
    """Write a new random key for `key_file` into FILE (0600). Keep a copy elsewhere."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise Conflict(f"{file} exists already", "name a file that does not: keys are never overwritten") from None
    except OSError as error:
        raise NotFound(f"{file} cannot be written: {error.strerror}", "name another file") from None
    with os.fdopen(descriptor, "w") as opened:
        opened.write(secrets.token_hex(32) + "\n")
    remark(f"{file} holds a new key; what is encrypted with it cannot be read without it: keep a copy elsewhere")


def _named(config: Path) -> tuple[str, StoreSettings]:
    """Location and settings of the store of a daemon. Raises `UsageError`, `NotFound`."""
    import msgspec

    from moorage.config import read_table
    from moorage.store_settings import StoreSettings

    table = read_table(config)
    try:
        settings = msgspec.convert(table.get("store_settings", {}), StoreSettings)
    except msgspec.ValidationError as error:
        raise UsageError(f"{config}: {error}", "docs/configuration.md lists the settings") from error
    location = str(table.get("store", ""))
    if not location:
        raise UsageError(f"{config} names no store", "name the file of a coordinator or a worker")
    return location, settings


def rebuild_index(
    config: Annotated[Path, typer.Option("--config", metavar="FILE", help="A daemon's settings: the store.")],
    output: Output = None,
) -> None:
    """Index again what is in no sound index object, from the packs themselves. Jobs may run meanwhile; no prune may."""
    from moorage.store import Store

    form = local_output_format(output)
    location, settings = _named(config)
    rebuilt = Store.open(location, settings=settings).rebuild_index()
    for problem in rebuilt.problems:
        remark(problem)
    write({"store": location, **rebuilt._asdict(), "problems": len(rebuilt.problems)}, form)


def rotate_key(
    config: Annotated[Path, typer.Option("--config", metavar="FILE", help="A daemon's settings: store and old key.")],
    new_key_file: Annotated[Path, typer.Option("--new-key-file", metavar="FILE", help="The new key.")],
    dry_run: DryRun = False,
    output: Output = None,
) -> None:
    """Wrap the store's key with another key. No stored data is rewritten; afterwards the old key opens nothing."""
    from moorage.store import config as stores
    from moorage.store_settings import key_of_file, wrapping_key

    form = local_output_format(output)
    location, settings = _named(config)
    new = key_of_file(new_key_file)
    old = wrapping_key(settings)
    if old is None:
        raise UsageError(f"{config} names no key", "the old key is needed: key_file, key_command or MOORAGE_KEY")
    backend = stores.backend_of(location, settings)
    if dry_run:
        found, _ = stores.load(backend, old)
        write({"store": location, "key": stores.wrapped_name(found, new), "would": "rotate"}, form)
        return
    removed = stores.rotate(backend, old, new)
    remark("the new key opens the store; give it to every daemon (they go on with what they have read until a restart)")
    write({"store": location, "removed": removed}, form)
