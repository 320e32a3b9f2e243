"""``kvgate top``: a running gateway at a glance, in the terminal."""

import json
import os
import signal
import sys
import time
from types import FrameType
from typing import Annotated, Final
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from kvgate.admin.address import GATEWAY_URL, GatewayUrl
from kvgate.admin.client import AdminClient, WrongKeyError, find_key
from kvgate.admin.output import AdminKey, StateFolder
from kvgate.display import draws_unicode, output, plain
from kvgate.failure import CommandError
from kvgate.host.paths import state_dir
from kvgate.top.feed import Feed, Known
from kvgate.top.frame import ASCII, UNICODE, Glyphs, Screen, frame
from kvgate.top.keys import key_within, single_keys

_KEY_WAIT_S: Final = 0.2
_SHOW_EVERY_S: Final = 1.0
_FOOTER: Final = "q quits"


def top(
    *,
    url: GatewayUrl = GATEWAY_URL,
    admin_key: AdminKey = None,
    state: StateFolder = None,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
) -> None:
    """Watch a running gateway: instances, tiers, traffic, tenants, policies. q quits."""
    feed = Feed(AdminClient(url, find_key(admin_key, state or state_dir())))
    name = urlsplit(url).netloc
    if not (once or as_json) and not (sys.stdin.isatty() and output.is_terminal):
        raise CommandError("kvgate top needs a terminal", "use --once for one frame or --json for one object")
    if not (once or as_json) and output.is_dumb_terminal:
        raise CommandError(
            f"kvgate top redraws the screen, and this terminal cannot (TERM={os.environ.get('TERM', '')})",
            "use --once for one frame or --json for one object",
        )
    known = feed.ask()
    if as_json:
        plain(json.dumps({"status": known.status, "shadows": known.shadows, "shadows_problem": known.shadows_problem}))
    elif once:
        screen = Screen(width=output.width, height=None, glyphs=glyphs_of(output))
        output.print(frame(known, screen, name=name, now_s=time.monotonic()), soft_wrap=True)
    else:
        _watch(feed, name)


def glyphs_of(console: Console) -> Glyphs:
    """Return what a terminal can draw: over SSH its locale may know nothing but ASCII."""
    return UNICODE if draws_unicode(console) else ASCII


def _watch(feed: Feed, name: str) -> None:
    resized, shown_at_s = True, 0.0

    def note(number: int, at: FrameType | None) -> None:
        del number, at
        nonlocal resized
        resized = True

    before = signal.signal(signal.SIGWINCH, note)
    feed.start()
    try:
        with single_keys(), Live(console=output, screen=True, auto_refresh=False) as live:
            while True:
                if feed.changed() or resized or time.monotonic() - shown_at_s >= _SHOW_EVERY_S:
                    resized, shown_at_s = False, time.monotonic()
                    live.update(_picture(feed.latest, name), refresh=True)
                if "q" in (key_within(_KEY_WAIT_S) or "").lower():  # several may have come at once
                    return
                _give_up(feed.latest)
    except EOFError:
        return
    finally:
        feed.stop()
        signal.signal(signal.SIGWINCH, before)


def _picture(known: Known | None, name: str) -> Text:
    if known is None:
        return Text("no data yet")
    width, height = output.size
    screen = Screen(width=width, height=height, glyphs=glyphs_of(output))
    return frame(known, screen, name=name, now_s=time.monotonic(), footer=_FOOTER)


def _give_up(known: Known | None) -> None:
    """A gateway that is away may come back; a key that is not taken any more does not."""
    if known is not None and isinstance(known.problem, WrongKeyError):
        raise known.problem
