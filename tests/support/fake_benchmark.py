"""In the place of SGLang's serving benchmark, which is not installed everywhere: the same arguments and result file."""

from __future__ import annotations

import argparse
import json
import time
import urllib.request

parser = argparse.ArgumentParser()
for name in ("backend", "base-url", "dataset-name", "random-range-ratio", "output-file", "tokenizer"):
    parser.add_argument(f"--{name}")
for name in ("num-prompts", "max-concurrency", "random-input-len", "random-output-len", "seed"):
    parser.add_argument(f"--{name}", type=int)
for name in ("flush-cache", "disable-tqdm", "lose-one"):
    parser.add_argument(f"--{name}", action="store_true")
args = parser.parse_args()
started = time.perf_counter()
tokens = 0
for _ in range(args.num_prompts):
    asked = {"text": "a", "sampling_params": {"max_new_tokens": args.random_output_len}, "stream": True}
    request = urllib.request.Request(f"{args.base_url}/generate", json.dumps(asked).encode())
    with urllib.request.urlopen(request) as response:
        tokens += sum(line.startswith(b"data: {") for line in response)
seconds = time.perf_counter() - started
result = {
    "completed": args.num_prompts - args.lose_one,
    "output_throughput": tokens / seconds,
    "median_tpot_ms": seconds / tokens * 1e3,
    "duration": seconds,
    "not_kept": "x",
}
with open(args.output_file, "a") as file:
    file.write(json.dumps(result) + "\n")
