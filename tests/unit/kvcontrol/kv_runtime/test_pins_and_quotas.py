"""Pinned blocks count against their tenant's burst like any other, and are never what leaves for it."""

from collections.abc import Iterator

import pytest

from kvcontrol.core.blocks import CacheTier
from kvcontrol.kv_runtime.quota import QuotaManager, TenantQuota
from tests.support.tiers import BLOCK_BYTES, Rig, path

BURST = 4


@pytest.fixture
def rig() -> Iterator[Rig]:
    quotas = QuotaManager()
    made = Rig(nvme=0, quotas=quotas)
    quotas.set("acme", CacheTier.DDR, TenantQuota(burst_bytes=BURST * BLOCK_BYTES))
    yield made
    made.hierarchy.check_integrity()
    made.close()


def there(rig: Rig, names: range) -> int:
    return sum(rig.tiers(record) != "" for record in path(names, tenant="acme"))


def test_a_save_beside_pins_gets_what_the_burst_leaves_and_no_pin_leaves_for_it(rig: Rig) -> None:
    pinned = path(range(3), tenant="acme")
    rig.save(pinned)
    rig.hierarchy.claims.hold(rig.ids(pinned))
    rig.save(path(range(10, 13), tenant="acme"))
    assert (there(rig, range(3)), there(rig, range(10, 13))) == (3, 1)
    rig.save(path(range(20, 23), tenant="acme"))
    assert there(rig, range(3)) == 3
    assert there(rig, range(10, 13)) + there(rig, range(20, 23)) == 1


def test_a_tenant_whose_pins_fill_its_burst_keeps_nothing_else_and_others_go_on(rig: Rig) -> None:
    pinned = path(range(BURST), tenant="acme")
    rig.save(pinned)
    rig.hierarchy.claims.hold(rig.ids(pinned))
    rig.save(path(range(10, 12), tenant="acme"))
    assert (there(rig, range(BURST)), there(rig, range(10, 12))) == (BURST, 0)
    rig.save(path(range(30, 34), tenant="umbra"))
    assert sum(rig.tiers(record) != "" for record in path(range(30, 34), tenant="umbra")) == 4
    rig.hierarchy.claims.release(rig.ids(pinned))
    rig.save(path(range(10, 12), tenant="acme"))
    assert there(rig, range(10, 12)) == 2
    assert there(rig, range(BURST)) == BURST - 2
