"""Pods that were born on a host that has run for long: their clocks are ahead of those of every host of the test.

To restore one of these is to restore a pod on a host with a smaller uptime: the kernel and CRIU know of the old host
only what the pod's clocks showed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from moorage.runtime import programs

#: What is added to monotonic and boot time.
SECONDS = 12 * 86400

_EDIT = """\
import json, sys
path = sys.argv[1] + "/config.json"
config = json.load(open(path))
offset = {{"secs": {seconds}, "nanosecs": 0}}
config["linux"]["timeOffsets"] = {{"monotonic": offset, "boottime": offset}}
json.dump(config, open(path, "w"))
"""
_RUNC = """\
#!/bin/sh
bundle= last= run=
for word in "$@"; do
    [ "$word" = run ] && run=1
    [ "$last" = --bundle ] && bundle=$word
    last=$word
done
[ -n "$run" ] && {python} -I {edit} "$bundle"
exec {runc} "$@"
"""


def runtime(folder: Path) -> dict[str, str]:
    """Lay a runc there that starts (not: restores) containers with such clocks; the environment that leads to it."""
    program, edit = folder / "bin" / "runc", folder / "edit.py"
    program.parent.mkdir(parents=True)
    edit.write_text(_EDIT.format(seconds=SECONDS))
    program.write_text(_RUNC.format(python=sys.executable, edit=edit, runc=programs.find("runc")))
    program.chmod(0o755)
    return {"MOORAGE_RUNTIME": str(folder)}
