"""Emptying prefix caches on several instances at once."""

import asyncio
from collections.abc import Mapping, Sequence

import msgspec

from gateway.fleet.control import InstanceControl, InstanceControlError
from gateway.registry import Instance
from kvcontrol.core.errors import UNREADABLE
from kvcontrol.core.ids import InstanceId
from kvcontrol.core.tier_control import RESET_PATH, CacheReset


async def reset_prefix_caches(
    control: InstanceControl, instances: Sequence[Instance]
) -> Mapping[InstanceId, CacheReset | InstanceControlError]:
    """Empty the caches of instances, except blocks in use; return the dropped blocks by tier, or the error."""

    async def one(instance: Instance) -> CacheReset | InstanceControlError:
        try:
            return msgspec.json.decode(await control.call(instance, "POST", RESET_PATH), type=CacheReset)
        except InstanceControlError as error:
            return error
        except UNREADABLE as error:
            return InstanceControlError(f"{RESET_PATH} can't be read: {error}", status=None, sure=False)

    done = await asyncio.gather(*(one(each) for each in instances))
    return dict(zip((each.id for each in instances), done, strict=True))
