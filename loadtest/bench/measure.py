"""Measure the cost of a proxy process next to nginx's, in alternating rounds, and print a Markdown table.

Every number is CPU time of the proxy (all its threads and children) over a window in which the mock engines count what
they served, divided by that count: the load generator's own start and end do not enter. See loadtest/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import resource
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import accounting
from processes import BenchError, Engines, Proxy, RunningProxy, kvgate, mock_engines, nginx, peer, serving

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LOAD_SCRIPT = HERE / "conversations.lua"


@dataclass(frozen=True)
class Case:
    """One kind of load. `counter` names the mock's counter that is the unit of its result."""

    name: str
    title: str
    body_bytes: int
    connections: int
    stream: bool = False
    close: bool = False

    @property
    def counter(self) -> str:
        return "chunks" if self.stream else "requests"


CASES = [
    Case("1kb", "1 KB body, 32 connections", 1024, 32),
    Case("32kb", "32 KB", 32 * 1024, 32),
    Case("400kb", "400 KB", 400 * 1024, 32),
    Case("new", "1 KB, new connection each", 1024, 32, close=True),
    Case("stream", "a streamed chunk, 64 streams", 1024, 64, stream=True),
]
LATENCY, SILENT = "latency", "silent"
LATENCY_CASE = Case(LATENCY, "", 1024, 1)


@dataclass
class Sample:
    """One proxy in one round of one case."""

    cpu_us: float  # a unit
    system_us: float  # the part of it in the kernel
    rate: float  # units a second
    utilisation: float  # CPU seconds a second
    errors: int


@dataclass
class Results:
    cpu: dict[str, dict[str, list[Sample]]] = field(default_factory=dict)  # case -> proxy -> rounds
    added_p50_us: dict[str, list[float]] = field(default_factory=dict)  # proxy -> rounds
    silent_kb: dict[str, list[float]] = field(default_factory=dict)  # KiB a stream
    silent_freed_s: dict[str, list[float | None]] = field(default_factory=dict)  # None: not within the wait
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Settings:
    rounds: int
    window_s: float
    warm_s: float
    silent_streams: int
    proxy_core: int | None
    client_core: int | None
    engines: int
    interval_ms: int


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def wrk_command(case: Case, port: int, duration_s: float) -> list[str]:
    flags = [word for word, wanted in (("stream", case.stream), ("close", case.close)) if wanted]
    return [
        "wrk",
        *("-t1", f"-c{case.connections}", f"-d{int(duration_s + 0.999)}s", "--timeout", "30s"),
        *("-s", str(LOAD_SCRIPT), f"http://127.0.0.1:{port}", "--", str(case.body_bytes), *flags),
    ]


def wrk_result(output: str) -> dict[str, int]:
    """The line that conversations.lua prints at its end."""
    for line in output.splitlines():
        if line.startswith("percentiles_us "):
            words = line.split()
            return {"p50_us": int(words[1]), "requests": int(words[5]), "errors": int(words[7])}
    raise BenchError(f"wrk printed no result:\n{output[-2000:]}")


def start_load(case: Case, port: int, duration_s: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        wrk_command(case, port, duration_s), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def measure_cpu(case: Case, proxy: RunningProxy, engines: Engines, settings: Settings) -> Sample:
    before_load = engines.counters()[case.counter]
    # one second more than warm-up and window, so that the load outlives the window; the script's bodies take time too
    load = start_load(case, proxy.port, settings.warm_s + settings.window_s + 2)
    try:
        while engines.counters()[case.counter] == before_load:
            if load.poll() is not None:
                raise BenchError(f"{case.name} through {proxy.name}: {load.communicate()[0][-2000:]}")
            time.sleep(0.02)
        time.sleep(settings.warm_s)
        cpu_0, units_0, t_0 = accounting.cpu_time(proxy.pid), engines.counters()[case.counter], time.monotonic()
        time.sleep(settings.window_s)
        cpu_1, units_1, t_1 = accounting.cpu_time(proxy.pid), engines.counters()[case.counter], time.monotonic()
        if load.poll() is not None:
            raise BenchError("the load ended before the window; use a longer --window-s")
        output, _ = load.communicate(timeout=60)
    finally:
        if load.poll() is None:
            load.kill()
            load.wait()
    if units_1 == units_0:
        raise BenchError(f"{case.name} through {proxy.name}: nothing was served in the window")
    cpu, units, seconds = cpu_1 - cpu_0, units_1 - units_0, t_1 - t_0
    return Sample(
        cpu.total / units * 1e6,
        cpu.system / units * 1e6,
        units / seconds,
        cpu.total / seconds,
        wrk_result(output)["errors"],
    )


def measure_p50(port: int, settings: Settings) -> tuple[int, int]:
    load = start_load(LATENCY_CASE, port, settings.window_s)
    result = wrk_result(load.communicate(timeout=settings.window_s + 60)[0])
    return result["p50_us"], result["errors"]


def open_stream(port: int, number: int) -> socket.socket:
    text = f"Conversation {number}. " + "Say something and then nothing more. " * 25
    body = json.dumps(
        {"model": "mock", "messages": [{"role": "user", "content": text}], "max_tokens": 100, "stream": True}
    ).encode()
    client = socket.create_connection(("127.0.0.1", port), timeout=30)
    client.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    return client


def read_first_event(client: socket.socket) -> None:
    seen = b""
    while b"data: " not in seen:
        part = client.recv(65536)
        if not part:
            raise BenchError(f"a silent stream was closed: {seen[:300]!r}")
        seen += part


def measure_silent(proxy: RunningProxy, engines: Engines, settings: Settings) -> tuple[float, float | None]:
    """KiB of resident memory a silent stream after its first event, and the seconds until all were freed once left."""
    with contextlib.ExitStack() as warm:  # what the first streams load and allocate once is no cost of a stream
        for client in [warm.enter_context(open_stream(proxy.port, -n)) for n in range(1, 9)]:
            read_first_event(client)
    wait_until_freed(engines)
    before = accounting.resident_bytes(proxy.pid)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(open_stream(proxy.port, n)) for n in range(settings.silent_streams)]
        for client in clients:
            read_first_event(client)
        after = accounting.resident_bytes(proxy.pid)
    return (after - before) / settings.silent_streams / 1024, wait_until_freed(engines)


def wait_until_freed(engines: Engines, limit_s: float = 10.0) -> float | None:
    start = time.monotonic()
    while engines.counters()["open_streams"] > 0:
        if time.monotonic() - start > limit_s:
            return None
        time.sleep(0.02)
    return time.monotonic() - start


def run_cpu_case(
    case: Case, proxies: Sequence[Proxy], mock: Path, folder: Path, settings: Settings, results: Results
) -> None:
    arguments = ["--engines", str(settings.engines), "--interval-ms", str(settings.interval_ms)]
    with contextlib.ExitStack() as stack:
        engines = stack.enter_context(mock_engines(mock, arguments, settings.client_core, folder / "mock.log"))
        started = [
            stack.enter_context(serving(p, engines, folder / case.name / p.name, settings.proxy_core, case.stream))
            for p in proxies
        ]
        table = results.cpu.setdefault(case.name, {p.name: [] for p in proxies})
        for round_number in range(settings.rounds):
            for proxy in started:
                sample = measure_cpu(case, proxy, engines, settings)
                table[proxy.name].append(sample)
                say(
                    f"{case.name} round {round_number + 1} {proxy.name}: {sample.cpu_us:.1f} us, "
                    f"{sample.rate:.0f}/s, CPU {sample.utilisation:.0%}, {sample.system_us:.1f} us in the kernel"
                )
                if sample.errors:
                    results.faults.append(f"{case.name}, {proxy.name}: {sample.errors} failed requests")


def run_latency(proxies: Sequence[Proxy], mock: Path, folder: Path, settings: Settings, results: Results) -> None:
    with contextlib.ExitStack() as stack:
        arguments = ["--engines", str(settings.engines)]
        engines = stack.enter_context(mock_engines(mock, arguments, settings.client_core, folder / "mock.log"))
        started = [
            stack.enter_context(serving(p, engines, folder / LATENCY / p.name, settings.proxy_core, False))
            for p in proxies
        ]
        for round_number in range(settings.rounds):
            direct_us, _ = measure_p50(engines.ports[0], settings)
            for proxy in started:
                p50_us, errors = measure_p50(proxy.port, settings)
                results.added_p50_us.setdefault(proxy.name, []).append(p50_us - direct_us)
                say(f"latency round {round_number + 1} {proxy.name}: p50 {p50_us} us, direct {direct_us} us")
                if errors:
                    results.faults.append(f"latency, {proxy.name}: {errors} failed requests")


def run_silent(proxies: Sequence[Proxy], mock: Path, folder: Path, settings: Settings, results: Results) -> None:
    arguments = ["--silent", "--engines", str(settings.engines)]
    with mock_engines(mock, arguments, settings.client_core, folder / "mock.log") as engines:
        for round_number in range(min(settings.rounds, 3)):
            for proxy in proxies:  # a fresh process each time: a used one has free memory to hide the streams in
                with serving(proxy, engines, folder / SILENT / proxy.name, settings.proxy_core, True) as started:
                    kb, freed_s = measure_silent(started, engines, settings)
                results.silent_kb.setdefault(proxy.name, []).append(kb)
                results.silent_freed_s.setdefault(proxy.name, []).append(freed_s)
                freed = f"freed in {freed_s:.2f} s" if freed_s is not None else "NOT freed in 10 s"
                say(f"silent round {round_number + 1} {proxy.name}: {kb:.1f} KiB a stream, {freed}")
                if wait_until_freed(engines) is None:
                    raise BenchError("engine streams outlive the proxy that opened them")


# ---- report ----


def ratio_text(samples: Sequence[float], floor: Sequence[float]) -> str:
    """Median, and how many times the floor it is: median of the rounds' ratios, with their least and greatest."""
    text = f"{statistics.median(samples):.1f}"
    if samples is floor or not floor:
        return text
    ratios = [a / b for a, b in zip(samples, floor, strict=True)]
    return f"{text} ({statistics.median(ratios):.2f}; {min(ratios):.2f}-{max(ratios):.2f})"


def first_line(*command: str) -> str:
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    except OSError:
        return "absent"
    lines = (done.stdout + done.stderr).strip().splitlines()
    return lines[0] if lines else "?"


def machine_lines(settings: Settings, kvgate_command: Sequence[str]) -> list[str]:
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in cpuinfo if "model name" in line), platform.machine())
    kvgate_version = first_line(*kvgate_command, "version") if kvgate_command else "without kvgate"
    commit = first_line("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")
    changed = first_line("git", "-C", str(ROOT), "status", "--porcelain", "-uno") != "?"
    pinning = (
        f"proxies on core {settings.proxy_core}, engines and load on core {settings.client_core}"
        if settings.proxy_core is not None
        else "none"
    )
    return [
        f"- {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC, commit {commit}"
        f"{' with changes' if changed else ''}, load average {os.getloadavg()[0]:.1f} at the end",
        f"- {model}, {os.cpu_count()} cores, Linux {platform.release()}; pinning: {pinning}",
        f"- {kvgate_version}; Python {platform.python_version()}; {first_line('nginx', '-v')}; "
        f"{first_line('wrk', '-v').split(' [')[0]}; {first_line('gcc', '--version')}",
        f"- {settings.engines} mock engines, {settings.rounds} alternating rounds, windows of {settings.window_s:g} s "
        f"after {settings.warm_s:g} s; streams: 100 chunks, one every {settings.interval_ms} ms; access logs: "
        "nginx off, kvgate as named, to /dev/null",
    ]


def report(proxies: Sequence[Proxy], settings: Settings, results: Results, kvgate_command: Sequence[str]) -> str:
    floor_name = proxies[0].name
    header, rows = ["proxy"], {p.name: [p.name] for p in proxies}
    load_header, load_rows = ["proxy"], {p.name: [p.name] for p in proxies}
    for case in CASES:
        if case.name not in results.cpu:
            continue
        header.append(case.title)
        load_header.append(case.title)
        table = {name: [s.cpu_us for s in samples] for name, samples in results.cpu[case.name].items()}
        for name, samples in results.cpu[case.name].items():
            rows[name].append(ratio_text(table[name], table[floor_name]))
            rate, busy, system = (
                statistics.median(getattr(s, key) for s in samples) for key in ("rate", "utilisation", "system_us")
            )
            load_rows[name].append(f"{rate:,.0f}/s at {busy:.0%}, {system:.1f} us in the kernel")
    if results.silent_kb:
        header += [f"KiB per silent stream ({settings.silent_streams:,} open)", "freed after the clients left, s"]
        for name, values in results.silent_kb.items():
            freed = results.silent_freed_s[name]
            rows[name].append(f"{statistics.median(values):.1f}")
            rows[name].append("not in 10" if None in freed else f"{max(f for f in freed if f is not None):.2f}")
    if results.added_p50_us:
        header.append("added p50 at 1 connection, us")
        for name, values in results.added_p50_us.items():
            rows[name].append(f"{statistics.median(values):.0f}")

    def markdown(head: list[str], body: dict[str, list[str]]) -> list[str]:
        return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body.values())]

    lines = [
        f"CPU of the proxy process in microseconds a request (or a chunk); in brackets times {floor_name}: median of "
        "the rounds, least-greatest.",
        "",
        *markdown(header, rows),
    ]
    if len(load_header) > 1:
        lines += [
            "",
            "The load behind these figures (units a second, how busy the proxy was, the kernel's part):",
            "",
            *markdown(load_header, load_rows),
        ]
    lines += ["", *machine_lines(settings, kvgate_command)]
    if results.faults:
        lines += ["", "NOT VALID:", *(f"- {fault}" for fault in results.faults)]
    return "\n".join(lines) + "\n"


def find_kvgate(given: str | None) -> list[str] | None:
    if given:
        return shlex.split(given)
    beside = Path(sys.executable).with_name("kvgate")
    if beside.exists():
        return [str(beside)]
    found = shutil.which("kvgate")
    return [found] if found else None


def arguments() -> argparse.Namespace:
    names = [case.name for case in CASES] + [SILENT, LATENCY]
    p = argparse.ArgumentParser(prog="loadtest/bench/run", description="CPU, memory and latency of the proxy process.")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--window-s", type=float, default=4.0, help="measured seconds a round (default 4)")
    p.add_argument("--warm-s", type=float, default=1.0, help="seconds of load before them (default 1)")
    p.add_argument("--cases", default=",".join(names), help=f"comma list of {', '.join(names)} (default: all)")
    p.add_argument("--engines", type=int, default=4, help="mock engines behind each proxy (default 4)")
    p.add_argument("--interval-ms", type=int, default=10, help="between the chunks of a stream (default 10)")
    p.add_argument("--silent-streams", type=int, default=1000)
    p.add_argument("--kvgate", help="its command; default: beside this Python, else from PATH. 'none' leaves it out")
    p.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND", help="a further proxy, see README")
    p.add_argument("--no-pin", action="store_true", help="don't pin to cores 0 and 1")
    p.add_argument("--out", type=Path, help="write the Markdown here too")
    p.add_argument("--json", type=Path, help="write every sample here")
    given = p.parse_args()
    given.cases = given.cases.split(",")
    if unknown := set(given.cases) - set(names):
        p.error(f"unknown cases: {', '.join(sorted(unknown))}")
    if given.rounds < 1 or given.window_s < 1:
        p.error("at least one round and windows of at least 1 s, please")
    return given


def main() -> int:
    given = arguments()
    for tool in ("gcc", "nginx", "wrk", "taskset"):
        if not shutil.which(tool):
            raise BenchError(f"{tool} is missing: apt-get install gcc nginx-light wrk util-linux")
    pin = not given.no_pin and (os.cpu_count() or 1) > 1
    settings = Settings(
        rounds=given.rounds,
        window_s=given.window_s,
        warm_s=given.warm_s,
        silent_streams=given.silent_streams,
        proxy_core=1 if pin else None,
        client_core=0 if pin else None,
        engines=given.engines,
        interval_ms=given.interval_ms,
    )
    if settings.client_core is not None:
        os.sched_setaffinity(0, {settings.client_core})  # wrk inherits it
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # two descriptors a silent stream in the proxy

    proxies = [nginx()]
    kvgate_command: list[str] = []
    if given.kvgate != "none":
        found = find_kvgate(given.kvgate)
        if found is None:
            raise BenchError("no kvgate command found: pip install -e . or --kvgate COMMAND (or --kvgate none)")
        kvgate_command = found
        proxies += [
            kvgate("kvgate", kvgate_command, access=True),
            kvgate("kvgate, access log off", kvgate_command, access=False),
        ]
    proxies += [peer(spec) for spec in given.peer]

    results = Results()
    with tempfile.TemporaryDirectory(prefix="kvgate-bench-") as temporary:
        folder = Path(temporary)
        mock = folder / "mock_engine"
        subprocess.run(["gcc", "-O2", "-Wall", "-Wextra", "-o", mock, HERE / "mock_engine.c"], check=True)
        for case in CASES:
            if case.name in given.cases:
                run_cpu_case(case, proxies, mock, folder, settings, results)
        if SILENT in given.cases:
            run_silent(proxies, mock, folder, settings, results)
        if LATENCY in given.cases:
            run_latency(proxies, mock, folder, settings, results)

    text = report(proxies, settings, results, kvgate_command)
    print(text)
    if given.out:
        given.out.write_text(text)
    if given.json:
        given.json.write_text(json.dumps(results, default=vars, indent=1))
    return 1 if results.faults else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchError as error:
        sys.exit(f"bench: {error}")
