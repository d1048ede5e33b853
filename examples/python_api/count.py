"""Counts, a number every 50 ms, until there is a file ``enough``; says the nonce of its start again at the end."""

import hashlib
import secrets
import time
from pathlib import Path

nonce = secrets.token_hex(8)
print(f"begins with nonce {nonce}", flush=True)
total = hashlib.sha256()
number = 0
while not Path("enough").exists():
    total.update(f"{number}\n".encode())
    print(number, flush=True)
    number += 1
    time.sleep(0.05)
Path("counted.txt").write_text(f"{nonce} {total.hexdigest()}\n")
print(f"ends with nonce {nonce}", flush=True)
