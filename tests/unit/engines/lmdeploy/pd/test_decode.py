"""How long a prompt waits for its turn to be fetched."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from engines.lmdeploy.pd.decode import MAX_TRANSFERS, PdDecode
from engines.lmdeploy.pd.wire import TransferError
from engines.lmdeploy.settings import EngineSettings
from kvcontrol.core.pd import Fetch, new_ticket

FETCH = Fetch(ticket=new_ticket(), host="127.0.0.1", port=1)


def _identity() -> Any:
    raise AssertionError("nothing was offered")


async def test_a_prompts_turn_comes_within_its_own_time_or_it_is_computed_here() -> None:
    decode = PdDecode(SimpleNamespace(), EngineSettings(pd_transfer_timeout_s=0.05), identity=_identity)
    for _ in range(MAX_TRANSFERS):
        await decode._places.acquire()
    async with asyncio.timeout(30):
        with pytest.raises(TransferError, match="transfer queue was too long") as late:
            await decode._fetch(None, None, FETCH)
    assert late.value.cause == "timeout"
    decode._places.release()
    for _ in range(2):  # a place that was used is free again
        async with asyncio.timeout(30):
            with pytest.raises(TransferError) as failed:
                await decode._fetch(None, None, FETCH)
        assert failed.value.cause in {"unreachable", "timeout"}
