"""Where the files of a TLS identity lie. Apart from `trust`, which makes them, so that the guard need not load that."""

from __future__ import annotations

from pathlib import Path

import msgspec

#: The name in every server's certificate: nodes come and go with addresses of their own.
SERVER_NAME = "moorage"


class TlsFiles(msgspec.Struct, frozen=True):
    """Paths of PEM files: the authority to trust, and this process's certificate chain and private key."""

    ca: str
    cert: str
    key: str

    @classmethod
    def in_folder(cls, folder: Path) -> TlsFiles:
        """The files as `trust.issue` lays them: ``ca.pem``, ``cert.pem``, ``key.pem``."""
        return cls(str(folder / "ca.pem"), str(folder / "cert.pem"), str(folder / "key.pem"))

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Contents of ``(ca, cert, key)``. Raises `OSError`."""
        return Path(self.ca).read_bytes(), Path(self.cert).read_bytes(), Path(self.key).read_bytes()
