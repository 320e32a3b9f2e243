"""What shadow policies are told of one trie, and when they get to follow it.

A prompt is told when its match is accepted: its blocks that were found, then, as stored, what others decoded or
computed before it. At that moment a request waits for its first token, so it is only noted there, and followed a piece
at a time from a timer of the engine's loop. The engine's thread owns all of it.
"""

import logging
from collections.abc import Iterable
from typing import Any

from engines.control.shadows import ShadowTimer
from engines.lmdeploy.trie.contents import content_of
from kvcontrol.kv_policy import ShadowPolicies

_log = logging.getLogger(__name__)


class ShadowFeed:
    """Nothing here raises into the engine's loop: the first failure is counted, and switches the shadows off."""

    def __init__(self) -> None:
        self.policies: ShadowPolicies | None = None
        self.errors = 0
        self._fresh: dict[int, None] = {}
        """Contents that became resident and that no request has asked for yet."""
        self.timer = ShadowTimer(self.work)
        """Calls ``work`` whenever the engine's loop is free."""

    def committed(self, path: Iterable[Any]) -> None:
        """Note trie nodes that became resident, in prompt order. O(nodes)."""
        if self.policies is not None:
            self._fresh.update((content_of(each), None) for each in path)

    def matched(self, tail: Any) -> None:
        """Note an accepted request by the trie node its path ends in. O(its blocks, and the fresh). Never raises."""
        policies = self.policies
        if policies is None:
            return
        try:
            prompt = []
            node = tail
            while node is not None and node.parent is not None:
                prompt.append(content_of(node))
                node = node.parent
            prompt.reverse()
            for content in prompt:
                self._fresh.pop(content, None)
            fresh, self._fresh = self._fresh, {}
            if fresh:
                policies.stored(list(fresh))
            policies.requested(prompt)
        except Exception:  # noqa: BLE001  # the engine's loop dies of what escapes here, and shadows are not worth it
            self._fail()

    def work(self) -> bool:
        """Do a piece of what waits and return whether more does. Never raises."""
        if self.policies is None:
            return False
        try:
            return self.policies.work()
        except Exception:  # noqa: BLE001  # likewise
            self._fail()
            return False

    def _fail(self) -> None:
        self.policies = None
        self.errors += 1
        _log.exception("following a request failed; shadow policies are switched off")
