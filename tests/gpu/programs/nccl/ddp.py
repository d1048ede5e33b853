"""DistributedDataParallel: several buckets, so several all-reduces are on their way while the backward pass goes on."""

import torch
from rank import Rank
from torch.nn.parallel import DistributedDataParallel

rank = Rank(width=512, layers=6)
rank.join()
width = rank.options.width
layers = [layer for _ in range(rank.options.layers) for layer in (torch.nn.Linear(width, width), torch.nn.GELU())]
model = torch.nn.Sequential(*layers).to(rank.device)
parallel = DistributedDataParallel(model, device_ids=[rank.device] if rank.cuda else None, bucket_cap_mb=1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
generator = rank.generator(1)
for _ in rank.steps():
    batch = torch.randn(64, width, device=rank.device, generator=generator)
    rank.uneven()
    loss = (parallel(batch) - batch.roll(1, 1)).pow(2).mean()
    loss.backward()
    rank.uneven()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    rank.note(loss)
rank.end(model.parameters())
