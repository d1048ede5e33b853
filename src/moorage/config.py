"""Settings: the daemons' TOML files, and the client's settings merged from flags, environment and files.

A client setting is taken from the first place that names it: the flag, ``MOORAGE_*``,
``~/.config/moorage/config.toml``, ``/etc/moorage/config.toml``, and last the client file of the running dev cluster.
``MOORAGE_CONFIG`` (or ``--config``) names one file that stands for all three files.

No secret stands in a setting: keys and passwords are named by the path of a file that holds them.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import msgspec

from moorage.errors import NotFound, UsageError
from moorage.store_settings import StoreSettings
from moorage.tls import TlsFiles

OutputFormat = Literal["table", "json", "yaml"]

USER_FILE = "~/.config/moorage/config.toml"
SYSTEM_FILE = "/etc/moorage/config.toml"
#: A link that `moorage dev up` lays to the client file of the cluster that was started last.
DEV_CLIENT_FILE = "/run/moorage/dev/client.toml"
DEFAULT_RUNTIME = "/opt/moorage/runtime"
DEFAULT_STATE = "/var/lib/moorage"


class EtcdConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to reach etcd. ``endpoints`` are ``host:port``; TLS is used where ``tls`` is given."""

    endpoints: list[str]
    tls: TlsFiles | None = None
    user: str = ""
    password_file: str = ""

    def password(self) -> str:
        """The password from its file, without the line's end; empty if no file is named. Raises `NotFound`."""
        if not self.password_file:
            return ""
        try:
            return Path(self.password_file).read_text().rstrip("\n")
        except OSError as error:
            raise NotFound(
                f"etcd password file {self.password_file} cannot be read: {error.strerror}",
                "correct [etcd] password_file",
            ) from error


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker's settings. ``address`` is the host's own (VXLAN, gRPC); ``listen`` is ``host:port``."""

    cluster: str
    node: str
    address: str
    listen: str
    store: str
    tls: TlsFiles
    etcd: EtcdConfig
    state: str = DEFAULT_STATE
    metrics: str = ""  # IP:PORT of /metrics, /healthz, /readyz; empty: none. Mutual TLS unless it is a loopback address
    lease_seconds: int = 10
    labels: dict[str, str] = {}
    slots: int = 0  # most pods on this node; 0: no limit but its GPUs, and the cores and memory that jobs ask for
    gpus: list[str] = []  # those that pods get, in this order: UUIDs, or numbers in bus order; empty: all, in bus order
    use_rto_max: bool = True  # let the pods' kernel wait at most a second to send again (tcp_rto_max_ms, Linux 6.15)
    uplink: str = ""  # interface towards the world; empty: the one of the default route
    runtime: str = DEFAULT_RUNTIME
    store_settings: StoreSettings = StoreSettings()


class CoordinatorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A coordinator's settings. ``advertise`` is the ``host:port`` under which clients and others reach it.

    ``durability``: when a checkpoint of a job that does not say counts. ``keep_ended``, ``keep_ended_days``: how many
    jobs that are over are remembered, and for how long; ``keep_resumable_days`` is for those that did not finish and
    have a checkpoint, which do not count among the others. 0 sets no limit.
    """

    cluster: str
    listen: str
    advertise: str
    store: str
    tls: TlsFiles
    etcd: EtcdConfig
    state: str = DEFAULT_STATE
    metrics: str = ""  # IP:PORT of /metrics, /healthz, /readyz; empty: none. Mutual TLS unless it is a loopback address
    lease_seconds: int = 10
    durability: Literal["local", "remote"] = "remote"
    store_settings: StoreSettings = StoreSettings()
    keep_ended: int = 1000
    keep_ended_days: float = 7.0
    keep_resumable_days: float = 0.0
    authority: str = ""  # folder of the cluster's authority: with it, machines can join by token
    node_store: str = ""  # the store's location on a node that joins; empty: the same as `store`


class ClientConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A client's settings. ``coordinator`` is ``host:port``, several separated by commas; ``name`` the principal."""

    coordinator: str
    tls: TlsFiles
    output: OutputFormat = "table"
    name: str = ""

    @property
    def coordinators(self) -> list[str]:
        """The coordinators' ``host:port``, in the order given."""
        return [part.strip() for part in self.coordinator.split(",") if part.strip()]


DaemonConfig = TypeVar("DaemonConfig", WorkerConfig, CoordinatorConfig, ClientConfig)


def load(path: Path | str, kind: type[DaemonConfig]) -> DaemonConfig:
    """Read one complete file. Raises `NotFound` if it is missing, `UsageError` (file and setting) if it is wrong."""
    try:
        return msgspec.convert(_read(Path(path)), kind)
    except msgspec.ValidationError as error:
        raise UsageError(f"{path}: {error}", "correct the setting; docs/configuration.md lists them all") from error


def read_table(path: Path) -> dict[str, Any]:
    """A file's settings as they stand. Raises `NotFound`, `UsageError`."""
    return _read(path)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise NotFound(f"configuration file {path} does not exist", "name another file") from error
    except OSError as error:
        raise NotFound(f"configuration file {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}", "correct the line") from error


#: Client settings: the dotted name in the file, and the name of the flag and (upper case, with the prefix) variable.
_CLIENT_SETTINGS = {
    "coordinator": "coordinator",
    "tls.ca": "tls_ca",
    "tls.cert": "tls_cert",
    "tls.key": "tls_key",
    "output": "output",
    "name": "name",
}


class _ClientFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A client's file: every setting may be left out."""

    coordinator: str | None = None
    tls: dict[Literal["ca", "cert", "key"], str] = {}
    output: OutputFormat | None = None
    name: str | None = None


def _client_file(path: Path) -> dict[str, str]:
    try:
        file = msgspec.convert(_read(path), _ClientFile)
    except msgspec.ValidationError as error:
        raise UsageError(f"{path}: {error}", "correct the setting; docs/configuration.md lists them all") from error
    values = {"coordinator": file.coordinator, "output": file.output, "name": file.name}
    values |= {f"tls.{name}": str(path.parent / Path(value).expanduser()) for name, value in file.tls.items()}
    return {name: value for name, value in values.items() if value is not None}


def _files(flag: str | None, environ: Mapping[str, str]) -> list[Path]:
    if explicit := flag or environ.get("MOORAGE_CONFIG"):
        return [Path(explicit)]
    user = Path(environ["HOME"], USER_FILE.removeprefix("~/")) if "HOME" in environ else Path(USER_FILE).expanduser()
    return [path for path in (user, Path(SYSTEM_FILE), Path(DEV_CLIENT_FILE)) if path.exists()]


def client_settings(
    flags: Mapping[str, str | None] | None = None,
    *,
    config: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The merged client settings by dotted name (``tls.ca``), only those that some place names.

    ``flags`` are named as `client_config` says; ``config`` is the flag ``--config``.
    """
    environ = os.environ if environ is None else environ
    flags = flags or {}
    unknown = set(flags) - set(_CLIENT_SETTINGS.values())
    if unknown:
        raise TypeError(f"no such client settings: {', '.join(sorted(unknown))}")
    merged: dict[str, str] = {}
    for path in reversed(_files(config, environ)):
        merged |= _client_file(path)
    for name, short in _CLIENT_SETTINGS.items():
        value = flags.get(short) or environ.get(f"MOORAGE_{short.upper()}")
        if value:
            merged[name] = value
    return merged


def output_format(settings: Mapping[str, str]) -> OutputFormat:
    """The output format of merged settings. Raises `UsageError` for one that does not exist."""
    value = settings.get("output", "table")
    for known in get_args(OutputFormat):
        if value == known:
            return known  # type: ignore[no-any-return]
    raise UsageError(f"output format {value!r} does not exist", f"use one of {', '.join(get_args(OutputFormat))}")


def client_config(
    flags: Mapping[str, str | None] | None = None,
    *,
    config: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> ClientConfig:
    """The client's settings; ``flags`` may name coordinator, tls_ca, tls_cert, tls_key, output and name.

    Raises `UsageError` if no coordinator or no certificate is named anywhere, `NotFound` if a named file is missing.
    """
    settings = client_settings(flags, config=config, environ=environ)
    output = output_format(settings)
    if not settings.get("coordinator"):
        raise UsageError(
            "no coordinator is named",
            "start a cluster here with `moorage dev up`, or set MOORAGE_COORDINATOR or `coordinator` in " + USER_FILE,
        )
    for target in settings["coordinator"].split(","):
        if target.strip() and not re.fullmatch(r".+:\d{1,5}", target.strip()):
            raise UsageError(f"coordinator {target.strip()!r} is not HOST:PORT", "correct --coordinator or its setting")
    tls = [settings.get(f"tls.{part}", "") for part in ("ca", "cert", "key")]
    if missing := [part for part, value in zip(("ca", "cert", "key"), tls, strict=True) if not value]:
        raise UsageError(
            f"no client certificate is named (tls.{', tls.'.join(missing)})",
            f"set MOORAGE_TLS_CA, MOORAGE_TLS_CERT and MOORAGE_TLS_KEY, or [tls] in {USER_FILE}",
        )
    for path in tls:
        if not Path(path).is_file():
            raise NotFound(f"certificate file {path} does not exist", "is the cluster that it belongs to still there?")
    return ClientConfig(
        coordinator=settings["coordinator"],
        tls=TlsFiles(*tls),
        output=output,
        name=settings.get("name", ""),
    )


def to_toml(settings: msgspec.Struct) -> str:
    """Write a struct of this module as TOML (strings, numbers, booleans, lists of them, nested tables)."""
    return _table(msgspec.to_builtins(settings), "")


def _table(values: Mapping[str, Any], prefix: str) -> str:
    lines = [f"{_key(name)} = {_value(value)}" for name, value in values.items() if not isinstance(value, dict | None)]
    for name, value in values.items():
        if isinstance(value, dict):
            header = f"{prefix}{_key(name)}"
            lines += ["", f"[{header}]", _table(value, header + ".").rstrip("\n")]
    return "\n".join(lines).strip("\n") + "\n"


def _key(name: str) -> str:
    return name if name and all(c.isascii() and (c.isalnum() or c in "-_") for c in name) else _value(name)


def _value(value: Any) -> str:
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    if isinstance(value, str):
        # A JSON string is a TOML basic string but for DEL, which JSON leaves bare.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    if isinstance(value, list):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    raise TypeError(f"no TOML for {type(value).__name__}")
