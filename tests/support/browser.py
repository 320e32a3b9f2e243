"""A real headless Chromium, Debian's, driven through its DevTools protocol."""

import asyncio
import base64
import itertools
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.running_gateway import eventually

ARTIFACTS = Path(__file__).parents[2] / "artifacts" / "status-page"
DEADLINE_S = 60.0
_KEYS = {
    "Tab": (9, None),
    "Enter": (13, "\r"),
    "Escape": (27, None),
    "Space": (32, " "),
}


def chromium() -> str:
    """The program; skips the test where there is none."""
    found = shutil.which("chromium")
    if found is None:
        pytest.skip("there is no chromium: apt-get install chromium (.ci/run does)")
    return found


class Page:
    """One tab. ``problems`` are what its console has complained about, and what the browser refused."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.problems: list[str] = []

    async def listen(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                waiting = self._answers.pop(said["id"], None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(said)
                continue
            match said["method"], said["params"]:
                case "Runtime.exceptionThrown", {"exceptionDetails": details}:
                    thrown = details.get("exception", {}).get("description", details["text"])
                    self.problems.append(f"exception: {thrown}")
                case "Runtime.consoleAPICalled", {"type": "error" | "warning" | "assert" as kind, "args": arguments}:
                    self.problems.append(f"console {kind}: {[each.get('value') for each in arguments]}")
                case "Log.entryAdded", {"entry": {"level": "error" | "warning", "text": text} as entry}:
                    self.problems.append(f"{text} {entry.get('url', '')}")

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(DEADLINE_S):
            said = await answer
        assert "error" not in said, (method, said)
        return dict(said["result"])

    async def goto(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def eval(self, script: str) -> Any:
        """Return what a script is, awaited; JSON only."""
        said = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in said, (script, said)
        return said["result"].get("value")

    async def until(self, script: str) -> None:
        """Wait until a script is true."""
        try:
            await eventually(lambda: self.eval(f"Boolean({script})"), DEADLINE_S)
        except TimeoutError:
            shown = await self.eval("document.body.innerText")
            raise AssertionError(f"never true: {script}; {self.problems}; the page says:\n{shown}") from None

    async def says(self, text: str) -> None:
        """Wait until the page shows a text, in whatever case its style gives it."""
        await self.until(f"document.body.innerText.toLowerCase().includes({json.dumps(text.lower())})")

    async def press(self, key: str, *, shift: bool = False) -> None:
        code, text = _KEYS[key]
        event = {"key": " " if key == "Space" else key, "code": key, "windowsVirtualKeyCode": code}
        event |= {"modifiers": 8} if shift else {}
        down = event if text is None else event | {"text": text}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **down)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def focus_by_keyboard(self, selector: str, *, most: int = 60) -> None:
        """Press Tab until an element has the focus; it fails when that cannot be reached."""
        at = f"document.activeElement?.matches({json.dumps(selector)})"
        for _ in range(most):
            if await self.eval(at):
                return
            await self.press("Tab")
        raise AssertionError(f"{selector} can't be reached with Tab")

    async def sign_in(self, gateway: str, admin_key: str, view: str = "overview") -> None:
        """Open a view of a gateway's status page with the admin key."""
        await self.goto(f"{gateway}/dashboard#{view}")
        await self.says("engine-0")
        if not await self.eval("document.getElementById('login').open"):
            await self.eval("document.getElementById('sign').click()")
        await self.type(admin_key)
        await self.press("Enter")
        await self.until("document.body.classList.contains('signed-in')")

    async def look(self, *, width: int, dark: bool) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        await self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )

    async def keep(self, name: str) -> None:
        """Keep the whole page as a picture among the test's artefacts."""
        ARTIFACTS.mkdir(parents=True, exist_ok=True)
        shot = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        (ARTIFACTS / f"{name}.png").write_bytes(base64.b64decode(shot["data"]))

    async def overflow(self) -> list[str]:
        """What sticks out of the page's width, in words; nothing where everything fits."""
        return list(
            await self.eval(
                "[...document.querySelectorAll('main *, header *')].filter((each) => {"
                " const box = each.getBoundingClientRect();"
                " const room = each.closest('.card, .numbers, header')?.getBoundingClientRect();"
                " return box.width && box.right > Math.min(innerWidth, room?.right ?? innerWidth) + 1"
                " && !each.closest('.wide, pre, .plot, .skip'); })"
                ".map((each) => `${each.tagName}.${each.className}: ${each.textContent.slice(0, 40)}`)"
            )
        )


@asynccontextmanager
async def browsing() -> AsyncIterator[Page]:
    """Run Chromium with an empty profile while the block runs, and leave no process behind."""
    program = chromium()
    profile = Path(tempfile.mkdtemp(prefix="kvgate-chromium-"))
    process = await asyncio.create_subprocess_exec(
        program,
        *("--headless=new", "--remote-debugging-port=0", f"--user-data-dir={profile}", "--no-first-run"),
        *("--disable-gpu", "--disable-extensions", "--disable-background-networking", "--disable-component-update"),
        *("--no-default-browser-check", "--no-proxy-server", "--disable-dev-shm-usage", "--disable-sync"),
        *(("--no-sandbox",) if os.geteuid() == 0 else ()),
        "about:blank",
        env={**os.environ, "HOME": str(profile)},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        told = profile / "DevToolsActivePort"
        await eventually(lambda: process.returncode is not None or (told.exists() and told.read_text().count("\n")), 60)
        assert process.returncode is None, "chromium ended at its start"
        port = told.read_text().split()[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                target = next(each for each in await answer.json() if each["type"] == "page")
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = Page(socket)
                listening = asyncio.create_task(page.listen())
                for domain in ("Page", "Runtime", "Log"):
                    await page.call(f"{domain}.enable")
                try:
                    yield page
                finally:
                    listening.cancel()
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        shutil.rmtree(profile, ignore_errors=True)


__all__ = ["ARTIFACTS", "Page", "browsing", "chromium"]
