"""Tensor-parallel inference: a transformers model with random weights, its layers cut over the ranks, answers a batch.

One step is one token, sampled; the key-value cache is static and starts anew when it is full.
"""

import torch
import torch.distributed as dist
from rank import Rank
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

rank = Rank(hidden=1024, layers=8, length=256)
rank.join()
config = LlamaConfig(
    vocab_size=8192,
    hidden_size=rank.options.hidden,
    intermediate_size=4 * rank.options.hidden,
    num_hidden_layers=rank.options.layers,
    num_attention_heads=16,
    num_key_value_heads=8,
    max_position_embeddings=2 * rank.options.length,
    attn_implementation="eager",
)
with torch.device(rank.device):
    model = LlamaForCausalLM(config).eval()
mesh = init_device_mesh(rank.device.type, (dist.get_world_size(),))
plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"} | {"self_attn.o_proj": RowwiseParallel()}
plan |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
for layer in model.model.layers:
    parallelize_module(layer, mesh, plan)
BATCH, PROMPT = 4, 32
generator = torch.Generator(rank.device).manual_seed(3)  # the same on all ranks: they sample the same token
tokens, at = None, 0
with torch.inference_mode():
    for _ in rank.steps():
        if tokens is None or at == rank.options.length:
            prompt = torch.randint(0, config.vocab_size, (BATCH, PROMPT), device=rank.device, generator=generator)
            cache, at = StaticCache(config=config, max_cache_len=rank.options.length), PROMPT
            tokens, positions = prompt, torch.arange(PROMPT, device=rank.device)
        else:
            positions = torch.tensor([at], device=rank.device)
            at += 1
        rank.uneven()
        logits = model(tokens, past_key_values=cache, cache_position=positions, use_cache=True).logits[:, -1].float()
        tokens = torch.multinomial(torch.softmax(logits, dim=-1), 1, generator=generator)
        rank.note(logits)
        rank.note(tokens)
rank.end([logits, *(getattr(p, "_local_tensor", p) for p in model.parameters())])
