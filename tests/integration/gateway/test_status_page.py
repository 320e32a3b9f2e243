"""The status page in a real Chromium: every view in light and dark, narrow and wide, by keyboard, with the admin key.

Pictures of all views are kept in ``artifacts/status-page``.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvcontrol.core import CacheTier
from kvcontrol.core.control import TierStats
from tests.support.admin import ADMIN_KEY, Admin
from tests.support.browser import Page, browsing, chromium
from tests.support.fleet import COMPLETIONS, Fleet, running_fleet
from tests.support.running_gateway import running_gateway
from tests.support.scripted_engine import MODEL, ScriptedEngine

VIEWS = {"overview": "Time to the first token", "tenants": "acme", "policies": "Swap to this", "explain": "To engine-"}
KEYS = [{"key": "sk-acme", "tenant": "acme"}, {"key": "sk-umbra", "tenant": "umbra"}]
STANDINGS = (("lru", 4200), ("mq(lifetime=2)", 5600), ("adaptive", 5900))
REFUSED_SWAP = "Failed to load resource: the server responded with a status of 409"
REFUSED_KEY = "Failed to load resource: the server responded with a status of 401"


def engine(number: int) -> ScriptedEngine:
    """One with three tiers, shadows and a choice of policies."""
    made = ScriptedEngine()
    made.tiers = {
        CacheTier.HBM: TierStats(
            capacity_blocks=4096,
            used_blocks=3300 - number * 900,
            cached_blocks=2600 - number * 900,
            block_bytes=1 << 21,
        ),
        CacheTier.DDR: TierStats(capacity_blocks=32768, used_blocks=21000, cached_blocks=21000, block_bytes=1 << 21),
        CacheTier.NVME: TierStats(capacity_blocks=1 << 18, used_blocks=0, cached_blocks=0, block_bytes=1 << 21),
    }
    made.stats_changes = {"prefix_cache": {"query_tokens": 812_345, "hit_tokens": 612_345}}
    made.available = {"lru": "the one that was used longest ago", "s3fifo": "three queues", "mq": "many queues"}
    standings = [
        {"policy": policy, "lookups": 10_000, "hits": hits, "hit_ratio": hits / 10_000, "window_hit_ratio": None}
        for policy, hits in STANDINGS
    ]
    shadow = {"standings": standings, "window_s": 1.0, "sampled_ratio": 1.0, "requests": 9, "skipped_requests": 0}
    name = ",".join(policy for policy, _ in STANDINGS)
    made.policies["shadow"] = {"kind": "shadow", "name": name, "params": {}, "shadow": shadow | {"busy_s": 0.1}}
    return made


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    chromium()
    engines = {f"engine-{number}": engine(number) for number in range(3)}
    async with running_fleet(tmp_path, engines, admin_key=ADMIN_KEY, api_keys=KEYS) as running:
        yield running


@pytest.fixture
async def page() -> AsyncIterator[Page]:
    async with browsing() as opened:
        await opened.look(width=1280, dark=False)
        yield opened


async def test_every_view_fits_in_light_and_dark_narrow_and_wide_and_nothing_complains(
    tmp_path: Path, page: Page
) -> None:
    """One of three instances serves 300 models."""
    engines = {f"engine-{number}": engine(number) for number in range(3)}
    engines["engine-1"].more_models = [f"zoo/adapter-with-a-long-name-{number:03}" for number in range(299)]
    async with running_fleet(tmp_path, engines, admin_key=ADMIN_KEY, api_keys=KEYS) as fleet:
        await look_at_every_view(fleet, page)
        await open_the_models(page, "engine-1")


async def open_the_models(page: Page, instance: str) -> None:
    """All models of an instance are a key away, and stay in sight while the page is kept up to date."""
    await page.eval("location.hash = '#overview'")
    await page.says("+297 more")
    heights = await page.eval("[...document.querySelectorAll('.instance')].map((each) => each.scrollHeight)")
    assert max(heights) < 1.5 * min(heights)
    opened = f"document.getElementById('models-of-{instance}').parentElement.open"
    await page.focus_by_keyboard(f"#models-of-{instance}")
    await page.press("Enter")
    await page.says("zoo/adapter-with-a-long-name-298")
    await page.eval("window.cardBefore = document.querySelector('.instance')")
    await page.until("document.querySelector('.instance') !== window.cardBefore")
    assert await page.eval(opened)
    assert await page.eval(f"document.activeElement.id === 'models-of-{instance}'")
    assert await page.overflow() == []
    await page.keep("overview-300-models")
    await page.press("Enter")
    await page.until(f"!{opened}")
    assert page.problems == []


async def look_at_every_view(fleet: Fleet, page: Page) -> None:
    admin = Admin(fleet.gateway)
    await admin.ok("PUT", "/quotas/acme", {"requests_per_min": 6, "tokens_per_min": 20_000, "concurrency": 8})
    await admin.ok("POST", "/instances/engine-2/drain")
    for number in range(5):
        body = {"model": MODEL, "prompt": [number % 2] * 320, "stream": True}
        async with fleet.gateway.post(COMPLETIONS, body, authorization="Bearer sk-acme") as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()
    await page.goto(f"{fleet.gateway.url}/dashboard")
    await page.says("are for administrators")
    assert await page.overflow() == []
    await page.keep("public")
    await page.sign_in(fleet.gateway.url, ADMIN_KEY)
    await page.until("document.querySelector('.chart .legend b')?.textContent !== '–'")
    await page.eval("location.hash = '#explain'")
    await page.until("document.getElementById('explain-model').value")
    await page.eval("document.getElementById('explain-form').value = 'prompt'")
    await page.eval("document.getElementById('explain-prompt').value = 'Where to?'")
    await page.eval("document.getElementById('explain-box').requestSubmit()")
    for width in (1280, 390):
        for dark in (False, True):
            await page.look(width=width, dark=dark)
            background = await page.eval("getComputedStyle(document.body).backgroundColor")
            assert background == ("rgb(14, 18, 24)" if dark else "rgb(245, 246, 248)")
            for view, text in VIEWS.items():
                await page.eval(f"location.hash = '#{view}'")
                await page.says(text)
                assert await page.overflow() == [], (view, width)
                await page.keep(f"{view}-{width}-{'dark' if dark else 'light'}")
    assert await page.eval("document.querySelectorAll('.uplot canvas').length") == 4
    assert "draining" in await page.eval("document.querySelectorAll('.instance')[2].getAttribute('aria-label')")
    assert page.problems == []


async def test_a_wrong_key_is_refused_and_the_right_one_opens_everything_by_keyboard_alone(
    fleet: Fleet, page: Page
) -> None:
    await page.goto(f"{fleet.gateway.url}/dashboard")
    await page.says("engine-0")
    await page.focus_by_keyboard("#sign")
    await page.press("Enter")
    await page.until("document.activeElement.id === 'key'")
    await page.type("not-the-admin-key-000")
    await page.press("Enter")
    await page.says("This is not the admin key")
    assert await page.eval("sessionStorage.length") == 0
    assert [each for each in page.problems if not each.startswith(REFUSED_KEY)] == []
    page.problems.clear()
    await page.type(ADMIN_KEY)  # what was refused is selected: this takes its place
    await page.press("Enter")
    await page.says("Requests a second")
    assert await page.eval("document.cookie") == ""
    await page.eval("document.activeElement.blur()")
    await page.press("Tab")
    for view in VIEWS:
        await page.focus_by_keyboard(f'nav a[href="#{view}"]')
        await page.press("Enter")
        await page.until(f"!document.getElementById('view-{view}').hidden")
        assert await page.eval("document.querySelector('nav a[aria-current]').hash") == f"#{view}"
    for theme in ("light", "dark"):
        await page.focus_by_keyboard("#theme")
        await page.press("Enter")
        assert await page.eval("document.documentElement.dataset.theme") == theme
    await page.focus_by_keyboard("#sign")
    await page.press("Enter")
    await page.says("are for administrators")
    assert await page.eval("sessionStorage.length") == 0
    assert page.problems == []


async def test_a_policy_is_swapped_on_all_engines_or_on_none_and_the_page_says_which(fleet: Fleet, page: Page) -> None:
    await page.sign_in(fleet.gateway.url, ADMIN_KEY, "policies")
    await page.says("mq(lifetime=2)")
    await page.focus_by_keyboard("#swap-to-1")  # adaptive found most, then mq(lifetime=2)
    await page.press("Enter")
    await page.says("Swap to mq(lifetime=2)?")
    await page.keep("swap")
    await page.press("Escape")
    await page.until("!document.getElementById('confirm').open")
    assert [each.told for each in fleet.engines.values()] == [[], [], []], "asked and not wanted"
    await page.focus_by_keyboard("#swap-to-1")
    await page.press("Enter")
    await page.until("document.activeElement.id === 'confirm-yes'")
    await page.press("Enter")
    await page.says("Done: mq(lifetime=2) is in charge")
    for each in fleet.engines.values():
        assert each.policies["eviction"] == {"kind": "eviction", "name": "mq", "params": {"lifetime": 2}}
    fleet.engines["engine-1"].refused_policies.add("s3fifo")
    await page.eval("document.getElementById('swap-name').focus()")
    await page.type("s3fifo")
    await page.says("s3fifo: three queues")
    await page.press("Enter")
    await page.until("document.activeElement.id === 'confirm-yes'")
    await page.press("Enter")
    await page.says("s3fifo is not for me")
    assert {each.policies["eviction"]["name"] for each in fleet.engines.values()} == {"mq"}
    await page.eval("document.getElementById('swap-name').value = ''; document.getElementById('swap-name').focus()")
    await page.type("mq(lifetime")
    await page.press("Enter")
    await page.says("it looks like lru or mq(lifetime=2)")
    assert [each.partition(" (")[0] for each in page.problems] == [REFUSED_SWAP]


async def test_a_fleet_without_anything_says_so_and_a_gateway_that_is_gone_is_noticed(
    tmp_path: Path, page: Page
) -> None:
    async with running_gateway(tmp_path, admin_key=ADMIN_KEY) as gateway:
        await page.goto(f"{gateway.url}/dashboard")
        await page.says("No instance is configured")
        await page.eval("document.getElementById('sign').click()")
        await page.type(ADMIN_KEY)
        await page.press("Enter")
        await page.says("Requests a second")
        for view, text in {
            "overview": "No request has ended yet",
            "tenants": "There is no API key yet",
            "policies": "No instance with policies is usable now",
            "explain": "no model is served",
        }.items():
            await page.eval(f"location.hash = '#{view}'")
            await page.says(text)
            await page.keep(f"{view}-empty")
        assert page.problems == []
    await page.says("The gateway does not answer: it can't be reached")
    await page.keep("gone")
