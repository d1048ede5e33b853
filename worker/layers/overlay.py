"""Overlay mounts, and whether a file system can carry an upper layer.

The options make an upper layer mean the same on every host:

* ``metacopy=off``: a file in the upper layer holds its data, never only its attributes.
* ``index=off``, ``nfs_export=off``, ``xino=off``: nothing refers to inode numbers or file handles of the lower layer.
* ``redirect_dir=on``: renaming a folder of the lower layer works as everywhere else. The upper layer then names the
  old place by path, so it needs what every unchanged file of the lower layer needs: the same lower layer.
* ``volatile``: the job's fsync does not wait for the disk, and unmounting does not write back the whole disk. An upper
  layer never outlives its host's crash: the newest checkpoint does.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Final

from moorage.errors import CorruptData, EnvironmentLacking
from moorage.worker.layers import syscalls
from moorage.worker.layers.hostmounts import mount_of, read_mounts
from moorage.worker.layers.layer import Layer

_OPTIONS: Final = "redirect_dir=on,metacopy=off,index=off,nfs_export=off,xino=off"
_WAY_OUT: Final = "give the worker a `state` folder on ext4, xfs, btrfs or tmpfs"


def _escaped(path: Path) -> str:
    text = str(path)
    for character in "\\,:":
        text = text.replace(character, "\\" + character)
    return text


def is_mounted(layer: Layer) -> bool:
    """Whether the layer's overlay is mounted in this mount namespace."""
    target = str(layer.merged)
    return any(mount.mountpoint == target and mount.kind == "overlay" for mount in read_mounts())


def mount_overlay(layer: Layer, *, crashed: bool = False, lower: Path | None = None) -> None:
    """Mount the layer; its folders exist. ``crashed``: the host has gone down since the upper layer was last mounted.
    ``lower``: another name of the layer's lower folder.

    Raises `EnvironmentLacking`, or `CorruptData` for an upper layer that a crash may have cut short.
    """
    unfinished = layer.work / "work" / "incompat" / "volatile"
    if unfinished.exists():
        if crashed:
            raise CorruptData(
                f"the pod's files in {layer.upper} may be incomplete: the machine went down while they were in use",
                "restore the job from its newest checkpoint",
            )
        shutil.rmtree(unfinished)
    places = (
        f"lowerdir={_escaped(lower or layer.lower)},upperdir={_escaped(layer.upper)},workdir={_escaped(layer.work)}"
    )
    try:
        try:
            syscalls.mount("overlay", layer.merged, "overlay", 0, f"{places},{_OPTIONS},volatile")
        except OSError as error:
            if error.errno != errno.EINVAL:  # kernels before 5.10 do not know volatile
                raise
            syscalls.mount("overlay", layer.merged, "overlay", 0, f"{places},{_OPTIONS}")
    except OSError as error:
        raise _lacking(layer, error) from None
    syscalls.mount("", layer.merged, "", syscalls.MS_PRIVATE)


def _lacking(layer: Layer, error: OSError) -> EnvironmentLacking:
    what = f"the overlay for {layer.mountpoint} of the pod cannot be mounted: {error.strerror}"
    match error.errno:
        case errno.ENODEV:
            return EnvironmentLacking(what, "load the kernel module: modprobe overlay")
        case errno.EPERM | errno.EACCES:
            return EnvironmentLacking(what, "run the worker as root")
        case errno.EBUSY:
            return EnvironmentLacking(what, f"another overlay uses {layer.upper}")
        case _:
            kind = mount_of(os.path.realpath(layer.lower), read_mounts()).kind
            return EnvironmentLacking(
                what, f"the kernel's log says more; {layer.lower} ({kind}) may need to be given with --mount instead"
            )


def unmount_overlay(layer: Layer) -> None:
    """Unmount; lazily if something still holds it. Nothing is mounted: nothing happens."""
    while is_mounted(layer):
        try:
            syscalls.unmount(layer.merged)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            syscalls.unmount(layer.merged, syscalls.MNT_DETACH)


def check_upper(folder: Path) -> None:
    """Whether upper layers can stand in ``folder``. Raises `EnvironmentLacking` with the way out. For doctor too."""
    kind = mount_of(os.path.realpath(folder), read_mounts()).kind
    if kind == "overlay":
        raise EnvironmentLacking(f"{folder} lies on an overlay, which cannot carry the upper layers of pods", _WAY_OUT)
    probe = Path(tempfile.mkdtemp(prefix="probe-", dir=folder))
    try:
        _probe(probe, kind)
    finally:
        shutil.rmtree(probe, ignore_errors=True)


def _probe(probe: Path, kind: str) -> None:
    where = f"{probe.parent} ({kind})"
    try:
        os.setxattr(probe, "trusted.moorage", b"1")
    except OSError as error:
        if error.errno == errno.EPERM:
            raise EnvironmentLacking("overlays need root", "run the worker as root") from None
        raise EnvironmentLacking(f"{where} cannot hold trusted extended attributes", _WAY_OUT) from None
    (probe / "lower").mkdir()
    if not syscalls.tells_types(probe):
        raise EnvironmentLacking(f"{where} does not tell the types of files (d_type)", _WAY_OUT)
    layer = Layer("probe", "/", probe / "lower", probe)
    for path in (layer.upper, layer.work, layer.merged):
        path.mkdir()
    (layer.lower / "old").mkdir()
    (layer.lower / "gone").touch()
    mount_overlay(layer)
    try:
        (layer.merged / "gone").unlink()
        (layer.merged / "old").rename(layer.merged / "new")
        status = (layer.upper / "gone").lstat()
        if not stat.S_ISCHR(status.st_mode) or status.st_rdev:
            raise EnvironmentLacking(f"{where} does not carry whiteouts", _WAY_OUT)
    except OSError as error:
        raise EnvironmentLacking(f"an overlay on {where} does not work: {error}", _WAY_OUT) from None
    finally:
        unmount_overlay(layer)
