"""Counts to N, a number every 50 ms; prints the nonce that it drew at its start, and a digest of all numbers."""

import hashlib
import secrets
import sys
import time
from pathlib import Path

nonce = secrets.token_hex(8)
print(f"begins with nonce {nonce}", flush=True)
total = hashlib.sha256()
for number in range(int(sys.argv[1])):
    total.update(f"{number}\n".encode())
    print(number, flush=True)
    time.sleep(0.05)
Path("counted.txt").write_text(f"{nonce} {total.hexdigest()}\n")
print(f"ends with nonce {nonce}", flush=True)
