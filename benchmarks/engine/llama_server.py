"""Drive a llama.cpp server over HTTP with token ids: the second peer of `compare_cpu.py`.

Greedy, end of sequence ignored, no prompt cache, one connection for each sequence of the batch.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.engine.probe import make_prompts, peak_rss_mib


class LlamaServer:
    """A running server with `slots` parallel sequences."""

    name = "llama.cpp"

    def __init__(
        self,
        binary: str,
        version: str,
        gguf: str,
        vocab: int,
        slots: int,
        context: int,
        port: int,
    ) -> None:
        self.version = version
        self._vocab, self._port = vocab, port
        command = [binary, "-m", gguf, "--host", "127.0.0.1", "--port", str(port), "-t", "2", "-tb"]
        command += ["2", "-c", str(context), "-np", str(slots), "-cb", "--no-warmup"]
        started = time.perf_counter()
        # The package lays the server's libraries beside it.
        env = os.environ | {"LD_LIBRARY_PATH": str(Path(binary).parent)}
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env
        )
        self._wait_until_ready()
        self.ready_s = time.perf_counter() - started

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(
                    f"http://127.0.0.1:{self._port}/health", timeout=1
                ) as r:
                    if r.status == 200:
                        return
            except OSError:
                if self._process.poll() is not None:
                    raise RuntimeError("the llama.cpp server ended while starting") from None
                time.sleep(0.1)
        raise RuntimeError("the llama.cpp server was not ready within 120 s")

    def _complete(self, prompt: list[int], tokens: int, counts: list[int]) -> None:
        body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "top_k": 1}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=300)
        connection.request(
            "POST",
            "/completion",
            json.dumps(body | {"ignore_eos": True, "cache_prompt": False}),
            {"Content-Type": "application/json"},
        )
        counts.append(json.loads(connection.getresponse().read())["tokens_predicted"])

    def _run(self, prompts: list[list[int]], tokens: int) -> float:
        counts: list[int] = []
        threads = [
            threading.Thread(target=self._complete, args=(ids, tokens, counts)) for ids in prompts
        ]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - start
        if counts != [tokens] * len(prompts):
            raise RuntimeError(f"llama.cpp answered with {counts[:3]} tokens, not {tokens}")
        return seconds

    def measure(self, batch: int, prompt: int, output: int, seed: int) -> dict[str, Any]:
        """Run one workload (one token, after a run that warms; all tokens) and return seconds."""
        self._run(make_prompts(batch, prompt, 3 * seed, self._vocab), 1)
        prefill = self._run(make_prompts(batch, prompt, 3 * seed + 1, self._vocab), 1)
        total = self._run(make_prompts(batch, prompt, 3 * seed + 2, self._vocab), output)
        return {"prefill_s": prefill, "total_s": total, "peak_mib": peak_rss_mib(self._process.pid)}

    def close(self) -> None:
        """End the server."""
        self._process.terminate()
        self._process.wait(timeout=30)
