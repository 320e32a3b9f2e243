"""How a chunk that overlaps with decode steps is launched."""

from typing import Any

from engines.lmdeploy.attention.overlapped import LAYERS_AT_ONCE, launch, launch_in_parts, overlapped


class Layer:
    """A layer's attention, which notes what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def _forward_prefill(self, *arguments: Any) -> str:
        self.calls.append(arguments)
        return "attention"


def test_a_chunk_pauses_between_parts_of_its_layers() -> None:
    layers = [Layer() for _ in range(2 * LAYERS_AT_ONCE + 3)]
    pauses: list[int] = []
    for layer in layers:
        launch_in_parts(layer)

    def pause() -> None:
        pauses.append(sum(len(layer.calls) for layer in layers))

    with overlapped(pause, 24):
        assert (launch.is_overlapped, launch.reserved_multiprocessors) == (True, 24)
        assert [layer._forward_prefill("query", number) for number, layer in enumerate(layers)] == ["attention"] * 23
    assert pauses == [LAYERS_AT_ONCE, 2 * LAYERS_AT_ONCE]
    assert [layer.calls for layer in layers] == [[("query", number)] for number in range(23)]


def test_other_prompts_never_pause_and_leave_no_multiprocessor() -> None:
    layer = Layer()
    launch_in_parts(layer)
    for _ in range(3 * LAYERS_AT_ONCE):
        layer._forward_prefill()
    assert (launch.is_overlapped, launch.reserved_multiprocessors) == (False, 0)
