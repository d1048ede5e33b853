"""What the programs beside it share: one rank of a job whose results are the same in every run, disturbed or not.

A rank works in steps until a file says at which one to stop (``--until``), or for ``--steps``. It shows how far it is
in ``FOLDER/progress-RANK`` and prints a nonce of its own, now and then a step, and at its end one line of JSON.

``--follow FOLDER``: never ahead of what the ranks of another run show there, so both can be told to stop at one step.
``--uneven MS``: ranks pause at different times, up to so many milliseconds, so that they are not equally far at any
instant; results do not depend on it. ``--device cpu`` runs the same over gloo.
"""

import argparse
import hashlib
import json
import os
import random
import secrets
import sys
import time
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist

PRIME = 6364136223846793005


class Rank:
    """One rank: its place, its device, its digest, its steps."""

    def __init__(self, **more):
        parser = argparse.ArgumentParser()
        parser.add_argument("--steps", type=int, default=1 << 40)
        parser.add_argument("--until", type=Path)
        parser.add_argument("--folder", type=Path)
        parser.add_argument("--follow", type=Path)
        parser.add_argument("--uneven", type=float, default=0.0)
        parser.add_argument("--device", default="cuda")
        for name, default in more.items():
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
        self.options = parser.parse_args()
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.nonce = secrets.token_hex(8)
        print(json.dumps({"rank": self.rank, "nonce": self.nonce}), flush=True)
        self.cuda = self.options.device == "cuda"
        # A GPU each, as far as there are so many.
        number = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count() if self.cuda else 0
        self.device = torch.device("cuda", number) if self.cuda else torch.device("cpu")
        self._pace = random.Random(f"pace {self.rank} {self.nonce}")
        self.step = 0
        self.began = time.monotonic()
        torch.manual_seed(0)
        torch.use_deterministic_algorithms(True, warn_only=True)
        if self.cuda:
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(1)
        #: Grows with everything that `note` is given; on the device, so that nobody waits for it.
        self.digest = torch.zeros((), dtype=torch.int64, device=self.device)

    def join(self):
        """The world's process group."""
        if self.cuda:
            dist.init_process_group("nccl", device_id=self.device)
        else:
            dist.init_process_group("gloo")

    def generator(self, seed):
        """Random numbers of this rank, on its device."""
        return torch.Generator(self.device).manual_seed(1000 * seed + self.rank)

    def note(self, tensor):
        """Take every bit of a tensor into the digest; nothing is waited for."""
        flat = tensor.detach().contiguous().flatten()
        if flat.dtype != torch.int64:
            flat = flat.view(torch.int32) if flat.element_size() == 4 else flat.to(torch.float32).view(torch.int32)
        self.digest.mul_(PRIME).add_(flat.sum(dtype=torch.int64))

    def uneven(self):
        """Now and then this rank is busy with something else for a moment."""
        if self.options.uneven and self._pace.random() < 0.5:
            time.sleep(self._pace.random() * self.options.uneven / 1000)

    def steps(self, every=4):
        """Numbers of steps from 1 on. Waits for the device after each ``every``."""
        while self.step < self._last():
            self._wait_for_leader()
            if self.step >= self._last():
                break
            self.step += 1
            yield self.step
            if self.step % every == 0:
                self.wait()
                self._tell()
        self.wait()
        self._tell()

    def wait(self):
        """For all work of the device."""
        if self.cuda:
            torch.cuda.synchronize()

    def _last(self):
        until = self.options.until
        last = int(until.read_text()) if until is not None and until.exists() else self.options.steps
        if self.step > last:
            print(f"rank {self.rank} is at step {self.step} already, and was told to stop at {last}", flush=True)
            os._exit(3)
        return last

    def _wait_for_leader(self):
        folder, until = self.options.follow, self.options.until
        while folder is not None and not (until is not None and until.exists()):
            shown = [int(path.read_text()) for path in folder.glob("progress-*") if path.suffix != ".new"]
            if len(shown) == self.size and min(shown) > self.step:
                return
            time.sleep(0.005)

    def _tell(self):
        if self.step % 100 == 0:
            print("step", self.step, int(self.digest), flush=True)
        if self.options.folder is not None:
            path = self.options.folder / f"progress-{self.rank}"
            path.with_suffix(".new").write_text(str(self.step))
            path.with_suffix(".new").rename(path)

    def end(self, tensors=()):
        """Print the results and end; ``tensors``: what the program has computed, whose bits are compared."""
        self.wait()
        whole = hashlib.sha256()
        for tensor in tensors:
            tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            whole.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        seconds = (time.monotonic() - self.began) / max(1, self.step)
        result = {"rank": self.rank, "nonce": self.nonce, "steps": self.step, "digest": int(self.digest)}
        print("seconds per step", round(seconds, 5), flush=True)
        print(json.dumps(result | {"weights": whole.hexdigest()[:32]}), flush=True)
        dist.barrier()
        dist.destroy_process_group()
        sys.stdout.flush()
