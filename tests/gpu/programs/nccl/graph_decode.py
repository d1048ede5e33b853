"""One step of tensor-parallel decoding captured in a CUDA graph with its NCCL calls, as inference engines do it.

Attention over a static key-value cache and a feed-forward part, each cut over the ranks with an all-reduce at its end;
the token and its place are inputs that are written before the graph is replayed.
"""

import torch
import torch.distributed as dist
from rank import Rank

rank = Rank(hidden=512, layers=4, length=128)
rank.join()
hidden, length, device, size = rank.options.hidden, rank.options.length, rank.device, rank.size
BATCH, VOCABULARY, HEAD = 4, 4096, 64
heads = hidden // HEAD // size
everybody = torch.Generator(device).manual_seed(5)
own = rank.generator(5)


def weights(rows, columns, generator=own):
    """Random, of about the scale that keeps activations as they are."""
    return torch.randn(rows, columns, device=device, generator=generator) / columns**0.5


embedding = weights(VOCABULARY, hidden, everybody) * hidden**0.5
layers = [
    {
        "qkv": weights(3 * heads * HEAD, hidden),
        "out": weights(hidden, heads * HEAD),
        "up": weights(4 * hidden // size, hidden),
        "down": weights(hidden, 4 * hidden // size),
        "cache": torch.zeros(2, BATCH, heads, length, HEAD, device=device),
    }
    for _ in range(rank.options.layers)
]
token = torch.zeros(BATCH, dtype=torch.int64, device=device)
place = torch.zeros(1, dtype=torch.int64, device=device)
seen = torch.arange(length, device=device)


def normal(x):
    return torch.nn.functional.layer_norm(x, (hidden,))


def decode():
    """The logits of the next token of each row; caches grow by one place."""
    x = embedding[token]
    for layer in layers:
        q, k, v = (normal(x) @ layer["qkv"].T).view(BATCH, 3, heads, 1, HEAD).unbind(1)
        layer["cache"][0].index_copy_(2, place, k)
        layer["cache"][1].index_copy_(2, place, v)
        scores = q @ layer["cache"][0].transpose(2, 3) / HEAD**0.5
        mixed = scores.masked_fill(seen > place, float("-inf")).softmax(-1) @ layer["cache"][1]
        part = mixed.reshape(BATCH, heads * HEAD) @ layer["out"].T
        dist.all_reduce(part)
        x = x + part
        part = torch.nn.functional.gelu(normal(x) @ layer["up"].T) @ layer["down"].T
        dist.all_reduce(part)
        x = x + part
    return normal(x) @ embedding.T


with torch.inference_mode():
    if rank.cuda:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                decode()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            captured = decode()
    for step in rank.steps():
        if step % length == 1:
            token.copy_(torch.randint(0, VOCABULARY, (BATCH,), device=device, generator=everybody))
        place.fill_(step % length)
        rank.uneven()
        if rank.cuda:
            graph.replay()
            logits = captured
        else:
            logits = decode()
        rank.uneven()
        token.copy_(torch.multinomial(logits.softmax(-1), 1, generator=everybody).squeeze(1))
        rank.note(logits)
        rank.note(token)
rank.end([logits, *(layer["cache"] for layer in layers)])
