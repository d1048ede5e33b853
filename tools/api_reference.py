"""docs/python-api.md: the public names of `moorage.coordinator.client`, from their signatures and docstrings."""

from __future__ import annotations

import inspect
import re
from typing import Any


def _text(thing: Any) -> str:
    return inspect.cleandoc(thing.__doc__ or "").replace("``", "`")


def _signature(name: str, thing: Any) -> str:
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return name
    parameters = [p for p in signature.parameters.values() if p.name != "self"]
    text = str(signature.replace(parameters=parameters))
    return name + re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)  # annotations are strings, defaults may be


def _members(cls: type) -> list[tuple[str, Any]]:
    found = []
    for name in dict.fromkeys(name for base in reversed(cls.__mro__[:-1]) for name in vars(base)):
        thing = inspect.getattr_static(cls, name)
        public = not name.startswith("_") and (inspect.isfunction(thing) or isinstance(thing, property))
        if public and thing.__doc__:
            found.append((name, thing))
    return found


def _section(name: str, thing: Any) -> list[str]:
    lines = ["", f"## {name}", ""]
    if inspect.isfunction(thing):
        return [*lines, "```python", _signature(name, thing), "```", "", _text(thing)]
    lines.append(_text(thing))
    fields = getattr(thing, "__struct_fields__", ())
    if fields:
        hints = thing.__annotations__
        lines += ["", "| field | type |", "|---|---|"]
        lines += [f"| `{field}` | `{str(hints.get(field, '')).replace('|', chr(92) + '|')}` |" for field in fields]
    for member, function in _members(thing):
        if isinstance(function, property):
            lines += ["", f"**`{member}`**: {_text(function)}"]
        else:
            lines += ["", f"**`{_signature(member, function)}`**", "", _text(function)]
    return lines


def page() -> str:
    """docs/python-api.md"""
    from moorage.coordinator import client

    order = ["Client", "Job", "AsyncClient", "AsyncJob", "job_spec", "torchrun_spec"]
    names = [*order, *sorted(set(client.__all__) - set(order))]
    lines = [
        "# The Python API",
        "",
        "```python",
        "from moorage import Client",
        "",
        "client = Client()",
        'job = client.torchrun("train.py", nnodes=2, nproc_per_node=8)',
        "checkpoint = job.checkpoint()",
        'job.restore(checkpoint, on=["node-c", "node-d"])',
        "print(job.wait().exit_code)",
        "```",
        "",
        "`Client` and `Job` block; `AsyncClient` and `AsyncJob` have the same verbs as coroutines and say in full what",
        "each does and raises. Every error is a class of `moorage.errors` ([errors.md](errors.md)).",
        "[examples/python_api](../examples/python_api/README.md) uses every verb. `tools/docs.py` writes this page.",
    ]
    for name in names:
        lines += _section(name, getattr(client, name))
    return "\n".join(lines) + "\n"
