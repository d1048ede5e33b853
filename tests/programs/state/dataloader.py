"""A torch DataLoader with persistent workers, shuffling and prefetching, and training on what it gives."""

from collections.abc import Iterator

import torch
from kit import equal, run
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((16,), float(index)) + torch.rand(16) * 1e-3


def program(nonce: bytes) -> Iterator[None]:
    torch.set_num_threads(1)
    seed = int.from_bytes(nonce[:4], "little")
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    loader = DataLoader(
        Numbers(), batch_size=8, shuffle=True, num_workers=2, persistent_workers=True, generator=generator,
        prefetch_factor=2, multiprocessing_context="fork",
    )  # fmt: skip
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.Adam(model.parameters())
    frozen = model.weight.detach().clone()
    order: list[int] = []
    batches = iter(loader)
    epoch = 0
    first = next(batches)
    order += first[:, 0].int().tolist()
    workers = [process.pid for process in batches._workers]  # type: ignore[attr-defined]
    yield
    while True:
        batch = next(batches, None)
        if batch is None:
            equal(sorted(order), list(range(64)), f"what epoch {epoch} gave")
            order, epoch, batches = [], epoch + 1, iter(loader)
            equal([process.pid for process in batches._workers], workers, "the workers")  # type: ignore[attr-defined]
            batch = next(batches)
        order += batch[:, 0].int().tolist()
        loss = model(batch / 64).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        equal(bool(torch.isfinite(loss)), True, "the loss")
        equal(frozen.shape == model.weight.shape, True, "the model")
        yield


run(program)
