from engines.lmdeploy.pd.metrics import pd_series
from kvcontrol.core.pd import PdStats

STATS = PdStats(
    held_requests=1,
    held_blocks=7,
    handed_over=2,
    expired=3,
    released=4,
    fetched=5,
    fetched_bytes=600,
    recomputed={"lost": 8, "checksum": 9},
    transfer_s=1.5,
)


def test_every_way_that_a_prompt_goes_is_counted() -> None:
    found = {
        (sample.name.removeprefix("kvgate_engine_"), *sample.labels.values()): sample.value
        for metric in pd_series(STATS)
        for sample in metric.samples
    }
    assert found == {
        ("handovers_total", "handed_over"): 2,
        ("handovers_total", "expired"): 3,
        ("handovers_total", "released"): 4,
        ("handovers_total", "fetched"): 5,
        ("handovers_total", "recomputed"): 17,
        ("handovers_recomputed_total", "lost"): 8,
        ("handovers_recomputed_total", "checksum"): 9,
        ("handover_bytes_total",): 600,
        ("handover_seconds_total",): 1.5,
        ("held_prompts",): 1,
        ("held_blocks",): 7,
    }
