"""A worker that serves, and a client inside its job. Pod 0 answers over HTTP; pod 1 asks without a pause.

The answer to a question depends on it and on a model that the server drew when it started, so an answer is right only
if it comes from that very server, wherever it runs by then. Each answer takes 0.1 s: there are always some in flight.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import secrets
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PORT = 8080
END = Path(sys.argv[1], "end")


def answer(model: str, question: str) -> str:
    return hashlib.sha256(f"{model} {question}".encode()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    model = secrets.token_hex(16)

    def do_GET(self) -> None:
        time.sleep(0.1)
        body = json.dumps({"answer": answer(self.model, self.path), "model": self.model}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def wait_for_end() -> None:
    while not END.exists():
        time.sleep(0.1)


def serve() -> None:
    server = ThreadingHTTPServer(("", PORT), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print("serves with model", Handler.model, flush=True)
    wait_for_end()
    time.sleep(1)  # what is in flight is answered
    print("ends with model", Handler.model, flush=True)


def ask() -> None:
    """Questions over the job's own network, on one connection for ever: it goes with the job."""
    asked = wrong = broken = 0
    models = set()
    connection = http.client.HTTPConnection(os.environ["MASTER_ADDR"], PORT, timeout=300)
    while not END.exists():
        try:
            connection.request("GET", f"/inside/{asked}")
            reply = json.loads(connection.getresponse().read())
        except (OSError, http.client.HTTPException):
            broken += asked > 0  # before the first answer the server may not listen yet
            connection.close()
            time.sleep(0.1)
            continue
        models.add(reply["model"])
        wrong += reply["answer"] != answer(reply["model"], f"/inside/{asked}")
        asked += 1
    print(json.dumps({"asked": asked, "wrong": wrong, "broken": broken, "models": sorted(models)}), flush=True)


if __name__ == "__main__":
    serve() if os.environ["RANK"] == "0" else ask()
