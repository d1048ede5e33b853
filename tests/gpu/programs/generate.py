"""A serving worker's shape: a transformers causal model answers a batch token by token, with a static KV cache."""

import argparse
import hashlib
import json
import secrets

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

parser = argparse.ArgumentParser()
parser.add_argument("--tokens", type=int, default=900)
parser.add_argument("--layers", type=int, default=16)
parser.add_argument("--hidden", type=int, default=2048)
options = parser.parse_args()

print(json.dumps({"nonce": (nonce := secrets.token_hex(8))}), flush=True)
torch.manual_seed(0)
torch.use_deterministic_algorithms(True, warn_only=True)
config = LlamaConfig(
    vocab_size=32000,
    hidden_size=options.hidden,
    intermediate_size=4 * options.hidden,
    num_hidden_layers=options.layers,
    num_attention_heads=16,
    num_key_value_heads=8,
    max_position_embeddings=2048,
    attn_implementation="eager",
)
torch.backends.cuda.matmul.allow_tf32 = False
with torch.device("cuda"):
    model = LlamaForCausalLM(config).eval()
BATCH, PROMPT = 8, 64
tokens = torch.randint(0, config.vocab_size, (BATCH, PROMPT), device="cuda")
cache = StaticCache(config=config, max_cache_len=PROMPT + options.tokens + 1)
digest = hashlib.sha256()
with torch.inference_mode():
    position = torch.arange(PROMPT, device="cuda")
    logits = model(tokens, past_key_values=cache, cache_position=position, use_cache=True).logits
    # Sampled, not greedy, so that the generator's state on the device matters as well.
    for number in range(options.tokens):
        probabilities = torch.softmax(logits[:, -1].float(), dim=-1)
        following = torch.multinomial(probabilities, 1)
        position = torch.tensor([PROMPT + number], device="cuda")
        logits = model(following, past_key_values=cache, cache_position=position, use_cache=True).logits
        digest.update(following.cpu().numpy().tobytes())
        if number % 5 == 0:
            print("step", number, flush=True)
digest.update(logits.float().cpu().numpy().tobytes())
print(json.dumps({"nonce": nonce, "digest": digest.hexdigest()[:32]}), flush=True)
