"""Which model a job serves or trains, from its command lines and the files that it has loaded. Pure over texts.

The owner may name it (label ``model``, or the variable ``MOORAGE_MODEL``); otherwise the flags of the known engines are
read, and last the files themselves: weights in a folder, or in the cache of Hugging Face, whose folders name id and
revision.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

_FLAGS: Final = (
    "--model",
    "--model-path",
    "--model_path",
    "--model_name_or_path",
    "--model-name-or-path",
    "--model_dir",
)
_REVISION: Final = ("--revision", "--model-revision")
_WEIGHTS: Final = re.compile(r"\.(?:safetensors|gguf|ggml|bin|pt|pth|ckpt|engine|npz)$")
_HUB: Final = re.compile(r"^(?P<root>.*/models--(?P<id>[^/]+))/(?:snapshots/(?P<revision>[^/]+)|blobs)/")
_ID: Final = re.compile(r"^[\w.-]+/[\w.-]+$")
#: Files that say what is in a model: small, and changed whenever it is.
INDEX_FILES: Final = (
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "preprocessor_config.json",
)


class Named(NamedTuple):
    """A model: ``name`` is an id or a path; ``folders``: absolute paths in the pod where its index files may lie."""

    name: str
    revision: str
    folders: tuple[str, ...]


def find(
    commands: Sequence[Sequence[str]], environment: Mapping[str, str], paths: Iterable[str], *, label: str = ""
) -> Named | None:
    """The model; None if nothing tells of one. ``environment``: of one of the job's processes."""
    told = label or environment.get("MOORAGE_MODEL", "")
    revision = ""
    for argv in commands:
        revision = revision or _value(argv, _REVISION)
        told = told or _value(argv, _FLAGS) or _served(argv)
    if told:
        return _named(told, revision, environment)
    weights = sorted(path for path in paths if _WEIGHTS.search(path) or _HUB.match(path))
    for path in weights:
        if match := _HUB.match(path):
            name = match["id"].replace("--", "/", 1)
            folder = f"{match['root']}/snapshots/"
            at = match["revision"] or ""
            return Named(name, at, (f"{folder}{at}",) if at else (folder,))
    if weights:
        folder = weights[0].rpartition("/")[0]
        return Named(folder, "", (folder,))
    return None


def _value(argv: Sequence[str], flags: Sequence[str]) -> str:
    for number, argument in enumerate(argv):
        name, equals, value = argument.partition("=")
        if name in flags:
            return value if equals else next(iter(argv[number + 1 : number + 2]), "")
    return ""


def _served(argv: Sequence[str]) -> str:
    """``vllm serve MODEL``."""
    for number, argument in enumerate(argv[:-1]):
        if argument == "serve" and any(part.rpartition("/")[2] == "vllm" for part in argv[:number]):
            following = argv[number + 1]
            return "" if following.startswith("-") else following
    return ""


def _named(told: str, revision: str, environment: Mapping[str, str]) -> Named:
    if told.startswith("/"):
        match = _HUB.match(told.rstrip("/") + "/")
        if match:
            return Named(match["id"].replace("--", "/", 1), match["revision"] or revision, (told,))
        return Named(told, revision, (told,))
    if not _ID.match(told):
        return Named(told, revision, ())
    home = environment.get("HF_HOME") or f"{environment.get('HOME', '/root')}/.cache/huggingface"
    hub = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    snapshots = f"{hub}/models--{told.replace('/', '--')}/snapshots/"
    return Named(told, revision, (f"{snapshots}{revision}" if revision else snapshots,))
