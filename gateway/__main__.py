"""``python -m gateway [--config FILE] [--workers N]``: run the gateway until a stop signal.

Exit codes: 0 stopped by a signal, 2 settings or state are not usable, 3 the address is taken or can't be listened on.
"""

import argparse
import logging
import os
import resource
import signal
import socket
import sys
import textwrap
from pathlib import Path
from types import FrameType

import uvicorn
from prometheus_client import disable_created_metrics

from gateway.errors import StartupError
from gateway.http.protocol import bounded_protocol
from gateway.http.shutdown import GracefulServer
from gateway.settings import PREFIX, Settings, load_settings, setting_fields
from gateway.telemetry import configure_logging
from gateway.telemetry.siblings import Siblings, socket_path
from gateway.wiring.app import build_app
from gateway.workers import WORKERS_LATER_S, Workers, end_with
from kvcontrol.core.garbage import freeze_garbage

EXIT_ADDRESS = 3
_BACKLOG = 2048
_OPEN_FILES = 1 << 16

_log = logging.getLogger("gateway")


def main(argv: list[str] | None = None) -> int:
    """Run, and return the exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    _leave_out_torch()
    try:
        if arguments.workers is not None:
            os.environ[f"{PREFIX}WORKERS"] = str(arguments.workers)
        settings = load_settings(arguments.config)
        configure_logging(settings.telemetry.log_format, settings.telemetry.log_level)
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a _created series beside every counter has no use
        _allow_many_files()
        if arguments.worker is not None:
            return _serve_as_worker(settings, arguments)
        listener = _listen(settings)
    except StartupError as error:
        return _fail(str(error), error.exit_code)
    except OSError as error:
        address = f"{settings.server.host}:{settings.server.port}"
        reason = f"can't listen on {address}: {error.strerror}; set another KVGATE_PORT, or stop what uses this one"
        return _fail(reason, EXIT_ADDRESS)
    with listener:
        if settings.server.workers == 1:
            return _serve(settings, [listener], None)
        _say_address(listener)
        _log.info("%d workers", settings.server.workers)
        given = [] if arguments.config is None else ["--config", str(arguments.config)]
        return Workers(
            settings.server.workers,
            arguments=given,
            listener=listener,
            notice_s=settings.server.shutdown_notice_s,
            grace_s=settings.server.shutdown_grace_s,
        ).run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvgate gateway",
        description="Run the kvgate gateway.",
        epilog=_variables(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, help="YAML file with settings; KVGATE_* variables override it")
    parser.add_argument("--workers", type=int, help="processes that share the address; overrides KVGATE_WORKERS")
    for name, kind in (("worker", str), ("worker-folder", Path), ("listen-fd", int), ("lifeline-fd", int)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)  # how workers are started
    return parser


def _variables() -> str:
    """Return every setting as a variable of the environment, with its description."""
    lines = ["environment (in the file the same names in lower case, without KVGATE_):"]
    for name, field in sorted(setting_fields().items()):
        lines.append(f"  {PREFIX}{name.upper()}")
        lines += textwrap.wrap(field.description or "", 96, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)


def _leave_out_torch() -> None:
    """Let transformers find no PyTorch: a tokenizer needs none, and its import costs two seconds and 200 MB."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # what the import system takes for "not installed"
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # silences a log line about missing PyTorch


def _serve_as_worker(settings: Settings, arguments: argparse.Namespace) -> int:
    number, count = map(int, arguments.worker.split("/"))
    end_with(arguments.lifeline_fd)
    siblings = Siblings(arguments.worker_folder, own=number, count=count)
    with (
        socket.socket(fileno=arguments.listen_fd) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as inner,
    ):
        path = socket_path(arguments.worker_folder, number)
        path.unlink(missing_ok=True)
        inner.bind(str(path))
        inner.listen(_BACKLOG)
        return _serve(settings, [listener, inner], siblings)


def _serve(settings: Settings, listeners: list[socket.socket], siblings: Siblings | None) -> int:
    try:
        app = build_app(settings, siblings)
    except StartupError as error:
        return _fail(str(error), error.exit_code)
    if siblings is None:
        _say_address(listeners[0])
    server = GracefulServer(
        uvicorn.Config(
            app,
            loop="uvloop",
            http=bounded_protocol(
                header_timeout_s=settings.server.header_timeout_s,
                body_timeout_s=settings.requests.body_timeout_s,
                send_timeout_s=settings.server.send_timeout_s,
                max_header_bytes=settings.server.max_header_bytes,
            ),
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            timeout_keep_alive=max(1, round(settings.server.keep_alive_timeout_s)),
        ),
        app.shutdown,
        notice_s=settings.server.shutdown_notice_s + (0 if siblings is None else WORKERS_LATER_S),
        alone=siblings is None,
        grace_s=settings.server.shutdown_grace_s,
    )
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises a signal again once it has shut down for it
        signal.signal(number, _stopped)
    freeze_garbage()
    server.run(sockets=listeners)
    return 0 if server.started else 1


def _say_address(listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    _log.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)


def _stopped(number: int, frame: FrameType | None) -> None:
    """A stop signal has done its work when the server ended; there is nothing left to do."""
    del number, frame


def _allow_many_files() -> None:
    """Raise the soft limit of open files to the hard one: a proxied stream takes two, and the usual limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _listen(settings: Settings) -> socket.socket:
    """Take the address before anything slow is done, so that a taken one is reported at once."""
    family, kind, _, _, address = socket.getaddrinfo(
        settings.server.host, settings.server.port, type=socket.SOCK_STREAM
    )[0]
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _fail(message: str, code: int) -> int:
    for line in message.splitlines():
        print(f"kvgate gateway: {line}", file=sys.stderr)  # noqa: T201 - before logging is set up, and for people
    return code


if __name__ == "__main__":
    sys.exit(main())
