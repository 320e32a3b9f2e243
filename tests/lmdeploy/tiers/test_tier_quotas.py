"""Quotas that an instance is started with hold from its first request on."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcontrol.core.tenant import tenant_of_salt
from kvcontrol.core.tier_control import QUOTAS_PATH
from tests.support.kv_events import get
from tests.support.processes import eventually
from tests.support.revisits import context
from tests.support.tiered_instance import TieredInstance

pytestmark = pytest.mark.engine

BLOCK_BYTES = 8192
DDR_BLOCKS = 64
BURST_BLOCKS = 24
GUARANTEED_BLOCKS = 16
QUIET, NOISY = tenant_of_salt("quiet"), tenant_of_salt("noisy")


@pytest.fixture(scope="module")
def instance(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TieredInstance]:
    folder = tmp_path_factory.mktemp("quotas")
    settings = {
        "KVGATE_ENGINE_DDR_BYTES": str(DDR_BLOCKS * BLOCK_BYTES),
        "KVGATE_ENGINE_TENANT_BURST_SHARE": str(BURST_BLOCKS / DDR_BLOCKS),
        "KVGATE_ENGINE_TENANT_GUARANTEED_SHARE": str(GUARANTEED_BLOCKS / DDR_BLOCKS),
        "KVGATE_ENGINE_GUARANTEED_TENANTS": QUIET,
    }
    options = ("--num-gpu-blocks", "32", "--logprobs-mode", "raw_logprobs")
    with TieredInstance.begin(tiny_llama, folder, settings, *options) as instance:
        yield instance


def used(instance: TieredInstance) -> dict[str, int]:
    accounts = get(instance.url + QUOTAS_PATH).body["tiers"]["DDR"]
    return {tenant: account["used_blocks"] for tenant, account in accounts.items()}


def test_the_quotas_of_the_start_are_told(instance: TieredInstance) -> None:
    quotas = get(instance.url + QUOTAS_PATH).body["tiers"]["DDR"]
    assert quotas[QUIET]["quota"] == {
        "guaranteed_bytes": GUARANTEED_BLOCKS * BLOCK_BYTES,
        "burst_bytes": BURST_BLOCKS * BLOCK_BYTES,
        "weight": 1.0,
    }
    assert quotas["shared"]["quota"] == {"guaranteed_bytes": 0, "burst_bytes": None, "weight": 1.0}


def test_a_tenant_never_fills_more_than_its_burst_and_pushes_nobody_below_a_guarantee(instance: TieredInstance) -> None:
    texts = [context(seed, 20) for seed in range(16)]
    first = instance.ask(texts[0], new_tokens=4, salt="quiet")
    kept = 0

    def has_all() -> bool:  # an answer's own blocks come after those of its prompt
        nonlocal kept
        before, kept = kept, used(instance)[QUIET]
        return (
            0 < before == kept
            and instance.ask(texts[0], new_tokens=4, salt="quiet").tokens == first.tokens
            and (used(instance)[QUIET] == kept)
        )

    eventually(has_all, 60, "all of the quiet tenant's blocks")
    assert 0 < kept <= GUARANTEED_BLOCKS, "the context must be small enough to be guaranteed whole"
    for round_ in range(2):
        for salt in ("noisy", "loud", "rude", ""):
            for text in texts[1:]:
                instance.ask(f"{round_} {text}", new_tokens=4, salt=salt)
            accounts = used(instance)
            assert all(blocks <= BURST_BLOCKS for tenant, blocks in accounts.items() if tenant != "shared"), accounts
            assert accounts[QUIET] == kept
    assert sum(used(instance).values()) == DDR_BLOCKS, "nothing of the tier is kept empty"
    assert get(instance.url + QUOTAS_PATH).body["tiers"]["DDR"][NOISY]["over_burst_blocks"] > 0
    again = instance.ask(texts[0], new_tokens=4, salt="quiet")
    assert again.tokens == first.tokens
    assert again.cached > 0, "what is guaranteed is found again"
