"""gRPC, imported so that it keeps its remarks to itself.

Its core writes a line to stderr for each handshake that fails, such as when another cluster has the port of one that is
gone. A client makes an error of it that says more; between the output of a job such lines are noise. Whoever sets
GRPC_VERBOSITY, or has imported gRPC before, has decided otherwise.
"""

from __future__ import annotations

import os

_SETTING = "GRPC_VERBOSITY"

if _SETTING in os.environ:
    import grpc
else:
    os.environ[_SETTING] = "NONE"
    try:
        import grpc  # it reads the setting now
    finally:
        del os.environ[_SETTING]  # not for the jobs and the processes that are started from here

__all__ = ["grpc"]
