"""FSDP2: every parameter is cut over the ranks; gathered before a layer works, its gradient scattered afterwards."""

import torch
import torch.distributed as dist
from rank import Rank
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

rank = Rank(width=512, layers=6)
rank.join()
width = rank.options.width
layers = [
    torch.nn.Sequential(torch.nn.Linear(width, 2 * width), torch.nn.GELU(), torch.nn.Linear(2 * width, width))
    for _ in range(rank.options.layers)
]
model = torch.nn.Sequential(*layers).to(rank.device)
mesh = init_device_mesh(rank.device.type, (dist.get_world_size(),))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model:
    fully_shard(layer, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
generator = rank.generator(2)
for _ in rank.steps():
    batch = torch.randn(64, width, device=rank.device, generator=generator)
    rank.uneven()
    loss = (model(batch).float() - batch.roll(1, 1)).pow(2).mean()
    loss.backward()
    rank.uneven()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    rank.note(loss)
rank.end(model.parameters())
