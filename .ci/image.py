"""The Dockerfile's steps without a container engine, and the image's promises put to the test (see .ci/container).

The Dockerfile is read, not repeated: an instruction or an option that is not known here ends the run. What differs from
a real build: each base image is this machine's root below an overlay, with `python` the interpreter that runs this. So
a library or a tool that the slim image lacks is not missed here.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import fnmatch
import json
import os
import re
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import Template
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "build" / "dist"
BASE_PATH = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
WAIT_S = 60.0  # for what has to happen; only a run that fails waits so long

# --- the Dockerfile ---------------------------------------------------------------------------------------------------


class NotKnown(Exception):
    """Something in the Dockerfile that this reader does not carry out."""


@dataclass(frozen=True)
class Instruction:
    """`RUN a && b` is ("RUN", {}, "a && b"); options are those with two dashes before the rest."""

    name: str
    options: Mapping[str, str]
    rest: str

    @property
    def words(self) -> list[str]:
        """Of the exec form (a JSON array), else split as a shell does."""
        if self.rest.startswith("["):
            return [str(word) for word in json.loads(self.rest)]
        return shlex.split(self.rest)


def parse(text: str) -> list[Instruction]:
    """All instructions in order. NotKnown: a here-document, or a parser directive."""
    found: list[Instruction] = []
    pending = ""
    for line in text.splitlines():
        if re.match(r"#\s*(syntax|escape)\s*=", line):
            raise NotKnown(line)
        if line.lstrip().startswith("#"):  # also between the lines of one instruction
            continue
        if not line.strip():
            continue
        pending += line.strip()
        if pending.endswith("\\"):
            pending = pending[:-1]
            continue
        name, _, rest = pending.partition(" ")
        pending = ""
        rest = rest.strip()
        options = {}
        while matched := re.match(r"--([a-z-]+)=(\S+)\s*", rest):
            options[matched[1]] = matched[2]
            rest = rest[matched.end() :]
        if "<<" in rest:
            raise NotKnown(f"{name}: a here-document")
        found.append(Instruction(name.upper(), options, rest))
    if pending:
        raise NotKnown(f"no end: {pending}")
    return found


@dataclass
class Image:
    """What a stage has come to."""

    root: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": BASE_PATH})
    arguments: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "0:0"
    entrypoint: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)


# --- what a build may see of the checkout -----------------------------------------------------------------------------


def sent(path: str, patterns: list[str]) -> bool:
    """Whether .dockerignore lets this into the build: the last pattern decides that matches it or a folder above."""
    kept = True
    parts = path.split("/")
    above = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    for pattern in patterns:
        wanted = pattern.removeprefix("!").strip("/")
        if any(_matches(part, wanted) for part in above):
            kept = pattern.startswith("!")
    return kept


def _matches(path: str, pattern: str) -> bool:
    """As Docker has it: * stays within a folder, ** does not."""
    if pattern.startswith("**/"):
        parts = path.split("/")
        return any(_matches("/".join(parts[at:]), pattern[3:]) for at in range(len(parts)))
    parts, wanted = path.split("/"), pattern.split("/")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def send_context(target: Path) -> None:
    """The files of the checkout that a build is given."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    for folder, names, files in os.walk(ROOT):
        at = Path(folder).relative_to(ROOT)
        # an excluded folder is not entered: no pattern here lets in a part of one
        names[:] = [name for name in names if sent(str(at / name), patterns)]
        for name in files:
            if sent(str(at / name), patterns):
                (target / at).mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / at / name, target / at / name)


# --- building ---------------------------------------------------------------------------------------------------------


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


class Build:
    """Carries the instructions out, one overlay a stage, all below `scratch`."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.context = scratch / "context"
        self.stages: dict[str, Image] = {}
        self.image: Image | None = None
        self.context.mkdir()
        self.begun_at = time.time()  # to be compared with files' times
        send_context(self.context)

    def run(self, instructions: list[Instruction]) -> Image:
        for instruction in instructions:
            print(f"---- {instruction.name} {instruction.rest}", flush=True)
            carry_out = getattr(self, f"_{instruction.name.lower()}", None)
            if carry_out is None:
                raise NotKnown(instruction.name)
            started = time.monotonic()
            carry_out(instruction)
            if instruction.name == "RUN":
                print(f"     {time.monotonic() - started:.0f} s", flush=True)
        return self._now

    @property
    def _now(self) -> Image:
        if self.image is None:
            raise NotKnown("an instruction before FROM")
        return self.image

    def _from(self, instruction: Instruction) -> None:
        words = instruction.words
        if (
            not re.fullmatch(r"python:3\.\d+-slim(-[a-z]+)?", words[0])
            or len(words) not in (1, 3)
            or instruction.options
        ):
            raise NotKnown(f"FROM {instruction.rest}: only python's slim images are stood in for")
        name = words[2] if len(words) == 3 else str(len(self.stages))
        folder = self.scratch / "stages" / name
        for part in ("upper", "work", "root"):
            (folder / part).mkdir(parents=True)
        root = folder / "root"
        mount("-t", "overlay", "overlay", "-o", f"lowerdir=/,upperdir={folder}/upper,workdir={folder}/work", str(root))
        self.image = Image(root)
        self.stages[name] = self.image
        furnish(root)
        _put_python(root)

    def _run(self, instruction: Instruction) -> None:
        image = self._now
        if instruction.options or instruction.rest.startswith("["):
            raise NotKnown(f"RUN {instruction.rest}")
        # What a build is told of the world outside: proxies, and where packages come from.
        outside = {name: value for name, value in os.environ.items() if re.match(r"PIP_|SSL_|\w+_proxy$", name, re.I)}
        # A Debian's own interpreter minds packages beside its own; this one's go no further than the overlay.
        outside["PIP_BREAK_SYSTEM_PACKAGES"] = "1"
        environment = {**outside, **image.environment, **image.arguments, "HOME": "/root"}
        command = inside(image, ["/bin/sh", "-c", instruction.rest], environment)
        with open(self.scratch / "log", "w+") as log:
            done = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
            if done.returncode:
                log.seek(0)
                print(*log.readlines()[-60:], sep="", flush=True)
                raise SystemExit(f".ci/container: RUN {instruction.rest}: exit code {done.returncode}")

    def _copy(self, instruction: Instruction) -> None:
        image = self._now
        *sources, target = instruction.words
        if instruction.options.keys() - {"from"} or any(set(source) & set("*?[") for source in sources):
            raise NotKnown(f"COPY {instruction.options} {instruction.rest}")
        origin = self.stages[instruction.options["from"]].root if "from" in instruction.options else self.context
        destination = image.root / os.path.normpath(os.path.join(image.workdir, target)).lstrip("/")
        for name in sources:
            source = origin / name.lstrip("/")
            if source.is_dir():
                shutil.copytree(source, destination, symlinks=True, dirs_exist_ok=True)
            elif target.endswith("/") or len(sources) > 1:
                destination.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, destination / source.name)
            else:
                shutil.copy2(source, destination)

    def _workdir(self, instruction: Instruction) -> None:
        image = self._now
        image.workdir = os.path.join(image.workdir, instruction.rest)
        (image.root / image.workdir.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def _arg(self, instruction: Instruction) -> None:
        (word,) = instruction.words
        name, _, value = word.partition("=")
        self._now.arguments[name] = value

    def _env(self, instruction: Instruction) -> None:
        image = self._now
        known = {**image.arguments, **image.environment}
        for word in instruction.words:
            name, _, value = word.partition("=")
            image.environment[name] = Template(value).substitute(known)

    def _user(self, instruction: Instruction) -> None:
        if not re.fullmatch(r"\d+:\d+", instruction.rest):
            raise NotKnown(f"USER {instruction.rest}: only numbers, since no user is made")
        self._now.user = instruction.rest

    def _expose(self, instruction: Instruction) -> None:
        """Tells people which port to publish, and does nothing."""

    def _healthcheck(self, instruction: Instruction) -> None:
        if not instruction.rest.startswith("CMD ["):
            raise NotKnown(f"HEALTHCHECK {instruction.rest}")
        self._now.healthcheck = [str(word) for word in json.loads(instruction.rest.removeprefix("CMD "))]

    def _entrypoint(self, instruction: Instruction) -> None:
        if not instruction.rest.startswith("["):
            raise NotKnown("ENTRYPOINT through a shell: signals would not arrive")
        self._now.entrypoint = instruction.words


def furnish(root: Path) -> None:
    """What every container is given: devices, processes, a place for temporary files; and nothing of this checkout."""
    mount("--rbind", "/dev", f"{root}/dev")
    mount("-t", "proc", "proc", f"{root}/proc")
    mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", f"{root}/tmp")
    mount("-t", "tmpfs", "-o", "mode=0755", "tmpfs", f"{root}/run")
    hidden = root / str(ROOT).lstrip("/")
    if hidden.is_dir():
        mount("-t", "tmpfs", "-o", "mode=0700", "tmpfs", str(hidden))


def _put_python(root: Path) -> None:
    """The base image's interpreter: `python` on the path, for every user."""
    real = Path(sys.executable).resolve()
    for folder in real.parents:
        place = root / str(folder).lstrip("/")
        place.chmod(place.stat().st_mode | 0o055)
    (root / "usr/local/bin").mkdir(parents=True, exist_ok=True)
    # Scripts and not links: an interpreter looks for its library from where it was called.
    for name, arguments in (("python", ""), ("python3", ""), ("pip", " -m pip")):
        script = root / "usr/local/bin" / name
        script.unlink(missing_ok=True)
        script.write_text(f'#!/bin/sh\nexec {real}{arguments} "$@"\n')
        script.chmod(0o755)


def inside(image: Image, command: list[str], environment: Mapping[str, str]) -> list[str]:
    """The command that runs `command` in the image's root, as its user and with nothing but its environment."""
    user, group = image.user.split(":")
    as_user = ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups"]
    if user != "0":
        as_user += ["--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]
    variables = [f"{name}={value}" for name, value in environment.items()]
    return ["chroot", str(image.root), *as_user, "env", "--ignore-environment", f"--chdir={image.workdir}", *variables,
            *command]  # fmt: skip


# --- running ----------------------------------------------------------------------------------------------------------

# Port 0 on both listeners: the image's health check has to find what came of it.
CONFIG = """
server.port = 0
admin.port = 0
health.interval_s = 0.2
health.healthy_after = 1
[[backends]]
url = "http://127.0.0.1:8000"
name = "engine"
"""
# Tells that its stream has begun, reads it to its end, and tells its last line.
CLIENT = """
import json, sys, urllib.request
body = {"model": "m", "stream": True, "max_tokens": 150, "messages": [{"role": "user", "content": "hello"}]}
request = urllib.request.Request(sys.argv[1] + "/v1/chat/completions", json.dumps(body).encode(),
                                 {"content-type": "application/json"})
with urllib.request.urlopen(request, timeout=60) as answer:
    print("begun at", answer.headers["x-kvgate-backend"], flush=True)
    lines = [line.strip() for line in answer if line.strip()]
print(lines[-1].decode(), flush=True)
"""


class Container:
    """The image, running: read-only root, its own processes and network, the entrypoint as process 1.

    `files` are mounted into /run, as a user mounts a configuration.
    """

    def __init__(self, image: Image, root: Path, files: Mapping[str, str], *arguments: str) -> None:
        self.root = root
        self._image = replace(image, root=root)
        root.mkdir()
        mount("--bind", str(image.root), str(root))
        mount("-o", "remount,bind,ro", str(root))
        furnish(root)
        for name, content in files.items():
            (root / "run" / name).write_text(content)
        # The new network has nothing but a loopback that is down, and /proc has to be that of the new processes.
        prepare = '"$0" "$1" loopback && umount "$2/proc" && mount -t proc proc "$2/proc" && shift 2 && exec "$@"'
        command = ["unshare", "--pid", "--net", "--ipc", "--uts", "--fork", "--kill-child", "/bin/sh", "-c", prepare,
                   sys.executable, __file__, str(root), *self._inside([*image.entrypoint, *arguments])]  # fmt: skip
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._lines: list[str] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _inside(self, command: list[str]) -> list[str]:
        return inside(self._image, command, self._image.environment)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            print(f"     | {line}", end="", flush=True)
            with self._changed:
                self._lines.append(line.rstrip("\n"))
                self._changed.notify_all()

    def wait_line(self, pattern: str) -> str:
        """What the pattern's group matches in the first line that has it."""

        def found() -> str | None:
            return next((matched[1] for line in self._lines if (matched := re.search(pattern, line))), None)

        with self._changed:
            self._changed.wait_for(found, WAIT_S)
            text = found()
        if text is None:
            raise SystemExit(f".ci/container: nothing matches {pattern!r} in what the gateway says")
        return text

    def pid(self) -> int:
        """The first process, as seen from outside: the only child of unshare."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (pid,) = map(int, children)
        return pid

    def execute(self, *command: str) -> list[str]:
        """The command that runs another in the container, as `docker exec` does."""
        return ["nsenter", f"--target={self.pid()}", "--pid", "--net", "--ipc", "--uts", *self._inside(list(command))]


def put_to_the_test(image: Image, scratch: Path) -> None:
    """Start it, look at it, use it, stop it. SystemExit: a promise is broken."""
    container = Container(image, scratch / "running", {"kvgate.toml": CONFIG}, "-c", "/run/kvgate.toml")
    with ended(container.process):
        url = container.wait_line(r"^listening on (.*)").replace("0.0.0.0", "127.0.0.1")
        pid = container.pid()
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        expect("the gateway is process 1 of its namespace", status["NSpid"].split()[-1], "1")
        expect("its user is the image's", set(status["Uid"].split()), {image.user.split(":")[0]})
        expect("it has no capability", {int(status[name], 16) for name in ("CapPrm", "CapEff", "CapBnd")}, {0})
        expect("its root is read-only", error_of_writing(container.root / "etc" / "new"), errno.EROFS)

        engine = container.execute("kvgate", "sim", "--port", "8000", "--served-model-name", "m", "--decode-ms", "10")
        with ended(subprocess.Popen(engine, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)):
            container.wait_line(r"backend engine: .*-> (up)")
            check = container.execute(*image.healthcheck)
            expect("the health check passes", subprocess.run(check, check=False, timeout=WAIT_S).returncode, 0)
            os.kill(pid, signal.SIGSTOP)
            frozen = subprocess.run(check, check=False, timeout=WAIT_S).returncode
            os.kill(pid, signal.SIGCONT)
            expect("a frozen gateway fails it", frozen, 1)

            client = container.execute("python", "-c", CLIENT, url)
            with ended(subprocess.Popen(client, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)) as stream:
                assert stream.stdout is not None
                expect("a stream begins", stream.stdout.readline(), "begun at engine\n")
                os.kill(pid, signal.SIGTERM)
                expect("it ends whole after SIGTERM", stream.communicate(timeout=WAIT_S)[0], "data: [DONE]\n")
            expect("the gateway then ends with 0", container.process.wait(timeout=WAIT_S), 0)
        expect("nothing was written, not even to /tmp", sorted(os.listdir(container.root / "tmp")), [])


def expect(what: str, seen: object, wanted: object) -> None:
    if seen != wanted:
        raise SystemExit(f".ci/container: {what}: {seen!r}, not {wanted!r}")
    print(f"     ok: {what}", flush=True)


def error_of_writing(file: Path) -> int | None:
    """Asked as root, whom no permission stops."""
    try:
        file.touch()
    except OSError as error:
        return error.errno
    return None


@contextlib.contextmanager
def ended(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> Iterator[Any]:
    """The process does not outlive the block."""
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def loopback_up() -> None:
    """`ip link set lo up`, which a small Debian lacks."""
    get_flags, set_flags, up = 0x8913, 0x8914, 0x1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        (flags,) = struct.unpack_from("16xH", fcntl.ioctl(any_socket, get_flags, request))
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sH14x", b"lo", flags | up))


# --- the whole --------------------------------------------------------------------------------------------------------


def main() -> int:
    (ROOT / "build").mkdir(exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="container-", dir=ROOT / "build"))
    try:
        build = Build(scratch)
        image = build.run(parse((ROOT / "Dockerfile").read_text()))
        keep(build.stages["build"].root / "dist", build.begun_at)
        print("---- the image, running", flush=True)
        put_to_the_test(image, scratch)
    finally:
        take_down(scratch)
    return 0


def keep(dist: Path, begun_at: float) -> None:
    """What was built is there for `make package`, which builds anew only what is older than its sources."""
    shutil.rmtree(DIST, ignore_errors=True)
    shutil.copytree(dist, DIST)
    (DIST / ".built").touch()
    os.utime(DIST / ".built", (begun_at, begun_at))


def take_down(scratch: Path) -> None:
    """Unmount first: below lie the machine's own /dev and /."""
    for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
        place = line.split()[4]
        if place.startswith(f"{scratch}/"):
            subprocess.run(["umount", "--lazy", place], check=True)
    if f" {scratch}/" in Path("/proc/self/mountinfo").read_text():
        raise SystemExit(f".ci/container: something is still mounted below {scratch}; nothing is removed")
    shutil.rmtree(scratch)


if __name__ == "__main__":
    if sys.argv[1:] == ["loopback"]:
        loopback_up()
    else:
        sys.exit(main())
