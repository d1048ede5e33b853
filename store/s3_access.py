"""Where an S3 store is and who may read it: location, region, credentials from the usual variables and files."""

from __future__ import annotations

import configparser
import os
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from moorage.errors import EnvironmentLacking, UsageError
from moorage.store_settings import StoreSettings

_LOCATION = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/((?:[A-Za-z0-9._-]+/)*[A-Za-z0-9._-]+))?/?")
_REREAD = timedelta(seconds=60)


def parse(location: str) -> tuple[str, str]:
    """Bucket and prefix of ``s3://bucket/prefix``. Raises `UsageError`."""
    found = _LOCATION.fullmatch(location)
    if not found or any(part in (".", "..") for part in (found.group(2) or "").split("/")):
        raise UsageError(f"store {location}: not the location of a bucket", "write s3://bucket or s3://bucket/prefix")
    return found.group(1), found.group(2) or ""


def region_of(settings: StoreSettings, environ: Mapping[str, str] | None = None) -> str:
    """The region to sign for; servers that have none do not mind."""
    environ = os.environ if environ is None else environ
    return settings.region or environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or "us-east-1"


def credential_provider(settings: StoreSettings, environ: Mapping[str, str] | None = None) -> Any:
    """A function (``S3CredentialProvider``) that reads the credentials file, again and again: renewed ones are used.

    None: the variables ``AWS_*`` have them, or there is no file and the machine's role is asked.
    """
    environ = os.environ if environ is None else environ
    if not settings.credentials_file and "AWS_ACCESS_KEY_ID" in environ:
        return None
    named = settings.credentials_file or environ.get("AWS_SHARED_CREDENTIALS_FILE", "")
    path = Path(named or "~/.aws/credentials").expanduser()
    if not named and not path.exists():
        return None
    profile = settings.profile or environ.get("AWS_PROFILE") or "default"

    def provide() -> dict[str, Any]:
        key, secret, token = read_credentials(path, profile)
        return {
            "access_key_id": key,
            "secret_access_key": secret,
            "token": token or None,
            "expires_at": datetime.now(UTC) + _REREAD,
        }

    provide()  # what is wrong with it is told at the start
    return provide


def read_credentials(path: Path, profile: str) -> tuple[str, str, str]:
    """Access key, secret key and session token (may be empty) of a profile. Raises `EnvironmentLacking`."""
    parser = configparser.ConfigParser(interpolation=None)
    try:
        with path.open() as file:
            parser.read_file(file)
        section = parser[profile]
        return section["aws_access_key_id"], section["aws_secret_access_key"], section.get("aws_session_token", "")
    except OSError as error:
        raise EnvironmentLacking(f"credentials file {path}: {error.strerror}", "name another, or set AWS_*") from None
    except KeyError as error:
        raise EnvironmentLacking(f"credentials file {path} has no {error} for profile {profile}", "add it") from None
    except configparser.Error:
        # Its message quotes the line, which may be a secret.
        raise EnvironmentLacking(f"credentials file {path} cannot be understood", "correct it") from None
