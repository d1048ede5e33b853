"""CuPy: products, random numbers and a raw kernel."""

import hashlib
import json
import secrets
import sys
import time

import cupy

print(json.dumps({"nonce": (nonce := secrets.token_hex(8))}), flush=True)
steps = int(sys.argv[1]) if len(sys.argv) > 1 else 1200
random = cupy.random.RandomState(0)
matrix = random.standard_normal((2048, 2048), dtype=cupy.float32) * 0.02
value = cupy.ones((2048, 256), dtype=cupy.float32)
kernel = cupy.RawKernel(
    'extern "C" __global__ void bend(float* x, int n) {'
    " int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) x[i] = tanhf(x[i]); }",
    "bend",
)
digest = hashlib.sha256()
for number in range(steps):
    value = matrix @ value + random.standard_normal(value.shape, dtype=cupy.float32)
    kernel(((value.size + 255) // 256,), (256,), (value, value.size))
    time.sleep(0.005)
    if number % 5 == 0:
        digest.update(value[:4].get().tobytes())
        print("step", number, flush=True)
digest.update(value.get().tobytes())
print(json.dumps({"nonce": nonce, "digest": digest.hexdigest()[:32]}), flush=True)
