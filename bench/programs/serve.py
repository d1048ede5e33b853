"""A serving worker: a transformers causal model, compiled, its CUDA graph warmed up, answers one token at a time.

``serve.py FOLDER GIB``: random weights of about GIB. For each FOLDER/ask it makes a token and writes it, with its
number, to FOLDER/token; FOLDER/ready says that it can. FOLDER/end ends it. For `bench.cold_start`.
"""

import os
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

folder, gib = sys.argv[1], float(sys.argv[2])
HIDDEN, BATCH, LONGEST = 4096, 4, 1024
# A layer has 4 hidden² for attention and 3 * 4 hidden² for its perceptron, in two bytes each.
layers = max(1, round(gib * 2**30 / (16 * HIDDEN**2 * 2)))
config = LlamaConfig(
    vocab_size=32000, hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, num_hidden_layers=layers,
    num_attention_heads=32, num_key_value_heads=32, max_position_embeddings=LONGEST,
)  # fmt: skip


def say(name: str, text: str = "") -> None:
    with open(f"{folder}/{name}.new", "w") as file:
        file.write(text)
    os.rename(f"{folder}/{name}.new", f"{folder}/{name}")


torch.manual_seed(0)
torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"):
    model = LlamaForCausalLM(config).eval()
cache = StaticCache(config=config, max_cache_len=LONGEST)
tokens = torch.randint(0, config.vocab_size, (BATCH, 1), device="cuda")
position = torch.zeros(1, dtype=torch.long, device="cuda")


def next_token(given: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    logits = model(given, past_key_values=cache, cache_position=at, use_cache=True).logits
    return logits[:, -1].argmax(-1, keepdim=True)


forward = torch.compile(next_token)


def step() -> None:
    tokens.copy_(forward(tokens, position))
    position.add_(1)


with torch.inference_mode():
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    position.zero_()
    graph.replay()
    torch.cuda.synchronize()
    say("ready", str(torch.cuda.memory_allocated()))
    number = 0
    while not os.path.exists(f"{folder}/end"):
        if os.path.exists(f"{folder}/ask"):
            os.remove(f"{folder}/ask")
            position.clamp_(max=LONGEST - 2)
            graph.replay()
            number += 1
            say("token", f"{number} {tokens.flatten().tolist()}")
        time.sleep(0.001)
