"""Several ways to talk in one program: groups that are split off, sends and receives as in a pipeline, all-to-all, and
batched sends and receives. Groups overlap; one of them is given up and made anew every ``--renew`` steps.

The digest has one part for each way, so that a difference tells where it is.
"""

import torch
import torch.distributed as dist
from rank import PRIME, Rank

rank = Rank(width=4096, renew=60)
rank.join()
me, size, width = rank.rank, rank.size, rank.options.width
device = rank.device
generator = rank.generator(3)
#: Every rank is in all of these: the world cut in two in two ways, and once more whole.
CUTS = [
    [list(range(0, size, 2)), list(range(1, size, 2))] if size > 2 else [list(range(size))],
    [list(range(size // 2)), list(range(size // 2, size))] if size > 2 else [list(range(size))],
    [list(range(size))],
]


def split(ranks):
    """The group of this rank, of those that the world is split into."""
    if rank.cuda:
        return dist.split_group(split_ranks=ranks)
    groups = [dist.new_group(some) for some in ranks]
    return next(group for group, some in zip(groups, ranks, strict=True) if me in some)


groups = [split(cut) for cut in CUTS]
parts = {name: torch.zeros((), dtype=torch.int64, device=device) for name in ("groups", "pipeline", "all", "batch")}
state = torch.randn(width, device=device, generator=generator)


def note(name, tensor):
    """Into one part, and with it into the whole."""
    parts[name].mul_(PRIME).add_(tensor.detach().contiguous().view(torch.int32).sum(dtype=torch.int64))


def in_groups(own):
    """All groups at once: what one sums is not waited for before the next one is asked."""
    sums = [own * (number + 1) for number in range(len(groups))]
    works = []
    for group, total in zip(groups, sums, strict=True):
        works.append(dist.all_reduce(total, group=group, async_op=True))
        rank.uneven()
    for work, total in zip(works, sums, strict=True):
        work.wait()
        note("groups", total)
    return sum(sums) / (size * len(sums))


def pipeline(own):
    """Two micro-batches forward through all ranks and back again: each rank works on what the one before has sent."""
    for micro in range(2):
        there = own + micro
        if me > 0:
            dist.recv(there, me - 1)
        there = torch.tanh(there * 1.01)
        if me < size - 1:
            dist.send(there, me + 1)
            dist.recv(there, me + 1)
        rank.uneven()
        if me > 0:
            dist.send(there * 0.99, me - 1)
        note("pipeline", there)
    return there


def to_all(own):
    """Everybody has something for everybody."""
    found = torch.empty_like(own)
    work = dist.all_to_all_single(found, own.contiguous(), async_op=True)
    rank.uneven()
    work.wait()
    note("all", found)
    return found


def batched(own):
    """Around a ring in both directions, as one batch."""
    left, right = torch.empty_like(own), torch.empty_like(own)
    before, after = (me - 1) % size, (me + 1) % size
    ops = [
        dist.P2POp(dist.isend, own, after),
        dist.P2POp(dist.irecv, left, before),
        dist.P2POp(dist.isend, own * 2, before),
        dist.P2POp(dist.irecv, right, after),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    note("batch", left)
    note("batch", right)
    return (left + right) / 3


for step in rank.steps():
    state = in_groups(state)
    state = pipeline(state)
    state = to_all(state) if rank.cuda else state  # gloo has none
    state = torch.tanh(batched(state) + 0.1 * torch.randn(width, device=device, generator=generator))
    rank.note(state)
    if step % rank.options.renew == 0:
        dist.destroy_process_group(groups[1])
        rank.uneven()
        groups[1] = split(CUTS[1])
rank.end([state, *parts.values()])
