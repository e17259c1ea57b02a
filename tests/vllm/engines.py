"""Real vLLM engines on the CPU, as processes that a test starts, asks, and kills."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

MODEL = "noise-chat"
BLOCK_TOKENS = 32  # the smallest block of vLLM's CPU attention
KV_BYTES = 288 * 2**20  # 12,288 tokens at 24,576 bytes each
# any free port: the engine says which at /kv_event_sources; without the `*` it would connect, not bind
KV_EVENTS = {
    "enable_kv_cache_events": True,
    "publisher": "zmq",
    "endpoint": "tcp://*:0",
    "replay_endpoint": "tcp://*:0",
}
START_LIMIT_S = 300.0  # about 25 s on two free cores; a busy machine takes its time


def eventually(condition: Callable[[], bool], within_s: float, what: str, every_s: float = 0.02) -> float:
    """Ask until it holds and return the seconds that took; fail after `within_s`. For state in other processes only."""
    start = time.monotonic()
    wait = threading.Event()
    while True:
        asked_after = time.monotonic() - start
        if asked_after > within_s:
            raise AssertionError(f"not within {within_s:g} s: {what}")
        if condition():
            return asked_after
        wait.wait(every_s)


def process_descendants(root: int) -> list[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [root]
    for pid in found:
        found.extend(child for child, parent in parents.items() if parent == pid)
    return found[1:]


def process_title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def ask(url: str, method: str = "GET", body: object = None, timeout_s: float = 10.0) -> tuple[int, str]:
    """One exchange on a connection of its own: status and text. OSError or HTTPException if there is no answer."""
    host, _, path = url.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(host, timeout=timeout_s)
    try:
        content = None if body is None else json.dumps(body)
        connection.request(method, f"/{path}", content, {"Content-Type": "application/json"} if content else {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def metric_sum(exposition: str, name: str, **labels: str) -> float | None:
    """The sum of the series of `name` that carry all of `labels`; None if there is no such series."""
    values = [
        float(line.rpartition(" ")[2])
        for line in exposition.splitlines()
        if (line.startswith((f"{name}{{", f"{name} "))) and all(f'{k}="{v}"' in line for k, v in labels.items())
    ]
    return sum(values) if values else None


class Engine:
    """One `vllm serve`: its API server is our child, EngineCore and Worker are below it. `flags` come last and win."""

    def __init__(self, name: str, url: str, environment: Path, log: Path, flags: Sequence[str] = ()) -> None:
        self._flags = tuple(flags)
        self.name = name
        self.url = url
        self._environment = environment
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._tree: list[int] = []

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def model_folder(self) -> Path:
        return self._environment / "kvgate-model"

    @property
    def whole(self) -> bool:
        """All of its processes run."""
        return self._process is not None and all(process_title(pid) for pid in (self.pid, *self._tree))

    def start(self) -> None:
        """Start the processes; `wait_until_up` waits for the engine behind them."""
        model = self.model_folder
        command = [
            *(str(self._environment / "bin" / "vllm"), "serve", f"./{model.name}"),
            *("--served-model-name", MODEL, "--host", "127.0.0.1"),
            *("--port", self.url.rpartition(":")[2]),
            *("--dtype", "float32", "--enforce-eager", "--max-model-len", "4096"),
            *("--block-size", str(BLOCK_TOKENS), "--kv-cache-memory-bytes", str(KV_BYTES)),
            # steps of an eighth of a second: vLLM ends those it has scheduled before it drops a cancelled prefill
            *("--max-num-batched-tokens", "128", "--max-num-seqs", "64"),
            *("--enable-prefix-caching", "--enable-prompt-tokens-details"),
            *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
            "--trust-request-chat-template",  # test_tokens.py renders others than the model's own
            *("--kv-events-config", json.dumps(KV_EVENTS)),
            *self._flags,
        ]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_")} | {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # its default pins every engine of the machine to core 0
            "OMP_NUM_THREADS": "1",
        }
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=model.parent,  # the relative model path keeps this machine's folders out of /v1/models
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_until_up(self) -> None:
        def answers() -> bool:
            assert self._process is not None
            if self._process.poll() is not None:
                raise AssertionError(f"{self.name} ended while starting, see {self._log}")
            try:
                return ask(f"{self.url}/health")[0] == 200
            except (OSError, http.client.HTTPException):
                return False

        eventually(answers, START_LIMIT_S, f"{self.name} answers /health, see {self._log}", every_s=0.25)
        # the first answer compiles and allocates what later ones find: keep it out of every test
        body = {"model": MODEL, "prompt": "Warm up.", "max_tokens": 2}
        status, text = ask(f"{self.url}/v1/completions", "POST", body, timeout_s=120)
        assert status == 200, text
        self._tree = process_descendants(self.pid)

    def kill_api_server(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def kill_engine_core(self) -> None:
        cores = [pid for pid in self._tree if "EngineCore" in process_title(pid)]
        assert len(cores) == 1, f"one EngineCore below {self.name}, not {[process_title(pid) for pid in self._tree]}"
        os.kill(cores[0], signal.SIGKILL)

    def stop(self) -> None:
        """End every process of the engine, however many of them are dead already."""
        if self._process is None:
            return
        tree = {*self._tree, *process_descendants(self.pid)}
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        # orphans of a killed API server notice by themselves, sooner or later; don't wait for later
        for pid in tree:
            if process_title(pid).startswith(("VLLM::", str(self._environment))):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process, self._tree = None, []

    # ---- what the engine says about itself ----

    def metric(self, name: str) -> float:
        """The sum of a metric's series, by its name on the wire without the prefix `vllm:`."""
        value = metric_sum(ask(f"{self.url}/metrics")[1], f"vllm:{name}")
        assert value is not None, f"{self.name} exports no vllm:{name}"
        return value

    def busy(self) -> float:
        return self.metric("num_requests_running") + self.metric("num_requests_waiting")

    def reset_prefix_cache(self) -> None:
        # refused while a block is still held by a request that has just ended
        eventually(lambda: ask(f"{self.url}/reset_prefix_cache", "POST")[0] == 200, 10, f"{self.name} resets its cache")
