"""JAX: a jitted training loop; its memory pool is allocated as it grows."""

import hashlib
import json
import os
import secrets
import sys

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0")

import jax
import jax.numpy as np
import numpy

print(json.dumps({"nonce": (nonce := secrets.token_hex(8))}), flush=True)
steps = int(sys.argv[1]) if len(sys.argv) > 1 else 1500
keys = jax.random.split(jax.random.key(0), 9)
weights = [jax.random.normal(key, (1024, 1024)) * 0.02 for key in keys[:8]]
batch = jax.random.normal(keys[8], (256, 1024))


def loss(weights, batch, key):
    value = batch
    for number, weight in enumerate(weights):
        kept = jax.random.bernoulli(jax.random.fold_in(key, number), 0.9, value.shape)
        value = np.tanh(value @ weight) * kept
    return np.mean((value - batch) ** 2)


@jax.jit
def step(weights, batch, key):
    value, gradients = jax.value_and_grad(loss)(weights, batch, key)
    return [weight - 0.1 * gradient for weight, gradient in zip(weights, gradients, strict=True)], value


digest = hashlib.sha256()
for number in range(steps):
    weights, value = step(weights, batch, jax.random.key(number))
    if number % 5 == 0:
        digest.update(numpy.asarray(value).tobytes())
        print("step", number, flush=True)
for weight in weights:
    digest.update(numpy.asarray(weight).tobytes())
print(json.dumps({"nonce": nonce, "digest": digest.hexdigest()[:32]}), flush=True)
