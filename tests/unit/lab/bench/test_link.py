from lab.bench.link import LinkPlan, run


def test_every_size_and_direction_is_measured_against_the_ceiling() -> None:
    plan = LinkPlan(device="cpu", rows=3, piece_bytes=4096, blocks=40, sizes=(1, 16), ceiling_bytes=1 << 20, repeats=2)
    metrics = run(plan)
    transfers = [f"{way}_{size}" for way in ("d2h", "h2d") for size in ("1", "16", "16_busy")] + ["both_16"]
    ceilings = {f"ceiling_{way}_gbps" for way in ("d2h", "h2d", "both")}
    assert set(metrics) == ceilings | {f"{name}_{unit}" for name in transfers for unit in ("ms", "gbps", "share_pct")}
    assert all(value > 0 for value in metrics.values())
