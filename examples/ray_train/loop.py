"""A ``train_loop_per_worker`` as Ray Train's documentation writes them. It knows nothing of moorage and saves nothing.

Shuffling, dropout and momentum: state of which a restart from scratch would lose all. Every report holds the exact loss
and a digest of the weights; the nonce shows that a rank was never started again. ``gate`` names a file for which the
last epochs wait, so that the example has the time to disturb.
"""

from __future__ import annotations

from typing import Any


def train_loop_per_worker(config: dict[str, Any]) -> None:
    import hashlib
    import secrets
    import time
    from pathlib import Path

    import torch
    from ray import train
    from ray.train.torch import prepare_data_loader, prepare_model
    from torch.utils.data import DataLoader, TensorDataset

    nonce = secrets.token_hex(8)
    context = train.get_context()
    torch.manual_seed(0)
    points = torch.randn(512, 16)
    data = TensorDataset(points, (points**2).sum(1, keepdim=True).sin())
    loader = prepare_data_loader(DataLoader(data, batch_size=32, shuffle=True))
    model = prepare_model(
        torch.nn.Sequential(torch.nn.Linear(16, 128), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(128, 1))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    torch.manual_seed(100 + context.get_world_rank())  # every rank drops other units
    for epoch in range(config["epochs"]):
        if context.get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        while epoch == config["epochs"] - 10 and config["gate"] and not Path(config["gate"]).exists():
            time.sleep(0.1)
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        digest = hashlib.sha256(bytes(flat.view(torch.uint8).tolist())).hexdigest()  # torch may be there without numpy
        train.report({"epoch": epoch, "loss": loss.item().hex(), "weights": digest, "nonce": nonce})
