"""A training step captured in a CUDA graph with its NCCL calls: forward, backward, all-reduces of the gradients on two
communicators, and Adam. The graph is replayed; now and then a step is made without it."""

import torch
import torch.distributed as dist
from rank import Rank

rank = Rank(width=512, layers=4)
rank.join()
width = rank.options.width
layers = [layer for _ in range(rank.options.layers) for layer in (torch.nn.Linear(width, width), torch.nn.GELU())]
model = torch.nn.Sequential(*layers).to(rank.device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, capturable=rank.cuda)
generator = rank.generator(4)
second = dist.new_group(list(range(rank.size)))
batch = torch.randn(64, width, device=rank.device, generator=generator)


def train():
    """The loss of one step; gradients are averaged over the ranks, every other one in a group of its own."""
    optimizer.zero_grad(set_to_none=False)
    loss = (model(batch) - batch.roll(1, 1)).pow(2).mean()
    loss.backward()
    works = []
    for number, parameter in enumerate(model.parameters()):
        parameter.grad.div_(rank.size)
        group = second if number % 2 else None
        works.append(dist.all_reduce(parameter.grad, group=group, async_op=True))
    for work in works:
        work.wait()
    optimizer.step()
    return loss


if rank.cuda:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            train()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = train()
for step in rank.steps():
    batch.copy_(torch.randn(batch.shape, device=rank.device, generator=generator))
    rank.uneven()
    if rank.cuda and step % 7:
        graph.replay()
        loss = captured
    else:
        loss = train()
    rank.uneven()
    rank.note(loss)
rank.end(model.parameters())
