"""A node with a GPU that is none: the real worker and the real broker over a device made of host memory.

``python -P -m tests.support.gpu_node worker …`` is ``moorage worker …`` on a machine whose driver is the fake one in
``FAKE_LIBCUDA`` (tests/native/fake_cuda); ``… --folder F`` is the GPU broker that this worker starts.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

from moorage.worker import gpu_host, inventory
from moorage.worker.gpu import client, main, process
from moorage.worker.gpu.broker import Broker, Devices
from tests.support.fake_gpu import FakeDevice, FakeDriver

UUID = "GPU-00000000-0000-0000-0000-000000000001"
MODEL = "A GPU of host memory"
#: What the broker waits for a process that does not answer, in seconds.
STATUS_SECONDS = 1.5


def worker() -> int:
    """The daemon; a GPU is found, its device nodes are not."""
    gpu_host.information = lambda folder=None: [{"GPU UUID": UUID, "Model": MODEL, "Device Minor": "0"}]  # type: ignore[assignment]
    gpu_host.driver = lambda: gpu_host.HostDriver(Path(os.environ["FAKE_LIBCUDA"]), [])  # type: ignore[assignment]
    gpu_host.device_node = lambda uuid: Path("/nonexistent") / uuid  # type: ignore[assignment]
    inventory.gpus = lambda folder=None: [f"{UUID} {MODEL}"]  # type: ignore[assignment]
    client.PROGRAM = "tests.support.gpu_node"
    from moorage.cli.main import main as moorage

    return int(moorage() or 0)


def broker() -> int:
    """The broker; the driver's own part of a process is nothing, since the fake driver's state is the process's own."""
    process.STATUS_SECONDS = STATUS_SECONDS
    main.real_devices = lambda: Devices(lambda _: FakeDevice(), lambda _: 0)
    setattr(main, "Broker", partial(Broker, drive=FakeDriver))  # type: ignore[arg-type]  # noqa: B010
    return main.main()


if __name__ == "__main__":
    sys.exit(worker() if "worker" in sys.argv[1:2] else broker())
