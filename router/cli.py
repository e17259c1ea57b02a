"""Arguments -> configuration -> what was asked. No logic, and no second copy of the options: config.py knows them.

Exit codes: 0 ended as asked, 1 failed, 2 wrong arguments or configuration.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from router import build_info, config

if TYPE_CHECKING:
    from router.backends.probe import Probed

# Imported only when asked for: a gateway has no use for a simulator or a client.
LATE_COMMANDS: Final = {
    "sim": ("router.sim.cli", "one simulated vLLM engine"),
    "demo": ("router.sim.demo", "four simulated engines behind a gateway, each strategy in turn, then a table"),
    "healthcheck": ("router.healthcheck", "does the gateway of this container answer; for the image's HEALTHCHECK"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; wrong arguments leave through argparse's SystemExit(2)."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parser(argv).parse_args(argv)
    try:
        code = int(arguments.run(arguments))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except config.ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before the command's own handlers stood: what runs until told to stop was told to
        return 0 if arguments.command in ("serve", "sim", "demo") else 1


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvgate", description="Request router for vLLM engines that knows their KV caches."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="the gateway; flags win over the file")
    serve.add_argument("-c", "--config", metavar="FILE", help="configuration (TOML), see config.example.toml")
    serve.add_argument(
        "--backend",
        action="append",
        default=[],
        metavar="URL",
        help="an engine, http://host:port; repeat for more. In place of the file's [[backends]]",
    )
    serve.add_argument("--strategy", metavar="S", help=", ".join(config.STRATEGIES))
    serve.add_argument("--host", metavar="H", help="address of the data port")
    serve.add_argument("--port", metavar="P", type=int, help="data port; 0: any free one, printed at start")
    serve.add_argument("--workers", metavar="N", type=int, help="processes that share the port")
    serve.set_defaults(run=_serve, usage_error=serve.error)

    check = commands.add_parser("check", help="is the configuration right, are the engines ready")
    check.add_argument("-c", "--config", metavar="FILE", required=True)
    check.add_argument(
        "--probe", action="store_true", help="ask each backend too, and name every precondition that is not met"
    )
    check.set_defaults(run=_check)

    for name, (module_name, summary) in LATE_COMMANDS.items():
        command = commands.add_parser(name, help=summary)
        if list(argv[:1]) == [name]:
            module = importlib.import_module(module_name)
            module.add_arguments(command)
            command.set_defaults(run=module.run)

    version = commands.add_parser("version", help="version, native build, Python")
    version.set_defaults(run=_version)
    return parser


def _serve(arguments: argparse.Namespace) -> int:
    if arguments.config is None and not arguments.backend:
        arguments.usage_error("one of -c FILE and --backend URL is needed")

    def read() -> config.Config:
        loaded = config.Config() if arguments.config is None else config.load(arguments.config)
        return config.with_flags(
            loaded,
            backends=arguments.backend,
            strategy=arguments.strategy,
            host=arguments.host,
            port=arguments.port,
            workers=arguments.workers,
        )

    settings = read()
    from router import app

    return app.run(settings, read)


def _check(arguments: argparse.Namespace) -> int:
    settings = config.load(arguments.config)
    findings = 0
    if arguments.probe:
        for result in asyncio.run(_probe(settings)):
            print(result)
            for finding in result.findings:
                print(finding, file=sys.stderr)
            findings += len(result.findings)
    if not findings:
        print("ok")
    return 2 if findings else 0


async def _probe(settings: config.Config) -> list[Probed]:
    from router.backends.probe import probe
    from router.kv_probe import probe_caches
    from router.l2.probe import probe_store
    from router.l2.settings import L2Settings

    by_events = settings.routing.strategy == "kvaware"
    results = await probe(settings.backends, kv_events=by_events)
    if by_events:
        await probe_caches(settings, results)
        store = L2Settings.of(settings.kv_cache)
        if store is not None:
            results.append(await probe_store(store, results))
    return results


def _version(_: argparse.Namespace) -> int:
    for line in build_info.lines():
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
