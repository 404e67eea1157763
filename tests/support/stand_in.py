"""A stand-in for an SGLang server: the few addresses that its serving benchmark asks, and made-up tokens.

It says nothing of SGLang's speed. It answers faster where the plugin is not switched off, so that tests can tell the
two sides apart. Run as ``python stand_in.py --port N [--model FOLDER]``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    model = "stand-in"
    token_s = 0.002

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        answers: dict[str, Any] = {
            "/health": {},
            "/v1/models": {"data": [{"id": self.model}]},
            "/model_info": {"model_path": self.model, "tokenizer_path": self.model},
            "/get_model_info": {"model_path": self.model, "tokenizer_path": self.model},
            "/server_info": {"internal_states": [{}]},
            "/get_server_info": {"internal_states": [{}]},
        }
        if self.path not in answers:
            self._send({}, 404)
            return
        self._send(answers[self.path])

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        asked = json.loads(self.rfile.read(size) or b"{}")
        if self.path != "/generate":
            self._send({})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        text = ""
        for number in range(1, int(asked["sampling_params"]["max_new_tokens"]) + 1):
            time.sleep(self.token_s)
            text += " a"
            told = {"text": text, "meta_info": {"completion_tokens": number, "prompt_tokens": 1}}
            self.wfile.write(f"data: {json.dumps(told)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _send(self, answer: Any, status: int = 200) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def serve(port: int, model: str, off: bool) -> ThreadingHTTPServer:
    handler = type("Configured", (Handler,), {"model": model, "token_s": 0.02 if off else 0.005})
    return ThreadingHTTPServer(("127.0.0.1", port), handler)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", default="stand-in")
    parser.add_argument("--fail", action="store_true")
    given = parser.parse_args()
    if given.fail:
        sys.exit("out of memory, say")
    serve(given.port, given.model, os.environ.get("DSV4TUNE_DISABLE") == "1").serve_forever()
