"""The S3 server of the demo (moto's), an encrypted store in it, and a look at what lies there."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any, Self

from moorage.dev import network
from moorage.dev.layout import Cluster
from moorage.store_settings import StoreSettings

BUCKET = "demo"
LOCATION = f"s3://{BUCKET}/moorage"
_START_SECONDS = 30.0


class Bucket:
    """``with Bucket(folder) as bucket``; the server starts when `on_network` is called, and listens there alone."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.marker = f"marker-{secrets.token_hex(16)}"
        self._log = folder / "s3.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._port = network.free_ports(1)[0]
        self._endpoint = ""
        credentials, key = folder / "credentials", folder / "key"
        self._write(credentials, "[default]\naws_access_key_id = demo\naws_secret_access_key = demo-secret\n")
        self._write(key, secrets.token_hex(32) + "\n")
        self.settings = StoreSettings(
            endpoint=f"http://{{gateway}}:{self._port}", credentials_file=str(credentials), key_file=str(key)
        )

    @staticmethod
    def _write(path: Path, text: str) -> None:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def on_network(self, cluster: Cluster) -> None:
        """Start the server on the cluster's network, and make the bucket."""
        self._endpoint = f"http://{cluster.gateway}:{self._port}"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "moto.server", "-H", cluster.gateway, "-p", str(self._port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
            )
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                self._ask("PUT", f"/{BUCKET}")
                return
            except OSError as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the S3 server does not start ({error}); see {self._log}") from error
                time.sleep(0.1)

    def _ask(self, method: str, path: str) -> bytes:
        credential = "Credential=demo/20260101/us-east-1/s3/aws4_request"
        headers = {"Authorization": f"AWS4-HMAC-SHA256 {credential}, SignedHeaders=host, Signature=0"}
        request = urllib.request.Request(self._endpoint + path, method=method, headers=headers)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
            return bytes(answer.read())

    def look(self) -> dict[str, Any]:
        """How many objects lie there, how large they are, and in how many the job's memory can be read."""
        listing = self._ask("GET", f"/{BUCKET}?list-type=2").decode()
        names = [part.partition("</Key>")[0] for part in listing.split("<Key>")[1:]]
        objects = [self._ask("GET", f"/{BUCKET}/{name}") for name in names]
        return {
            "objects": len(objects),
            "bytes": sum(map(len, objects)),
            "readable": sum(self.marker.encode() in data for data in objects),
        }


def delete_local_copies(cluster: Cluster) -> list[str]:
    """Delete what the hosts keep of the store; returns where something was."""
    deleted = []
    for node in cluster.nodes:
        folder = cluster.node_folder(node.name) / "store"
        if any(folder.rglob("packs/*")):
            deleted.append(node.name)
        shutil.rmtree(folder, ignore_errors=True)
    return deleted
