"""Keep engines of the tests running until Ctrl-C:  KVGATE_VLLM_VENV=DIR python -m tests.vllm.serve_engines [COUNT]"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path

from tests.vllm.engines import Engine
from tests.vllm.gateway import free_port


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    environment = Path(os.environ.get("KVGATE_VLLM_VENV", ".state/vllm-venv")).absolute()
    logs = Path(tempfile.mkdtemp(prefix="kvgate-vllm-logs-"))
    engines = [
        Engine(f"engine-{n}", f"http://127.0.0.1:{free_port()}", environment, logs / f"engine-{n}.log")
        for n in range(count)
    ]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.wait_until_up()
            print(engine.name, engine.url, flush=True)
        print(f"up; logs in {logs}", flush=True)
        signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        for engine in engines:
            engine.stop()


if __name__ == "__main__":
    main()
