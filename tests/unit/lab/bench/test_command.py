"""``kvgate bench`` prints one object, tables or Markdown, and refuses what it can't measure."""

import gzip
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from engines.models.tiny import build_tiny
from kvcontrol.kv_policy import POLICIES
from kvgate.failure import CommandError
from lab.bench.command import build_bench
from lab.bench.pool import report as pool
from lab.bench.schedule import report as schedule

QUICK = ("prefix", "--quick", "--blocks", "10000", "--instances", "2")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("models") / "tiny")


def bench(*arguments: str) -> Result:
    result = CliRunner().invoke(build_bench(), list(arguments), catch_exceptions=False)
    assert result.exit_code == 0
    return result


def test_prefix_prints_one_json_object_and_nothing_else(tiny: Path) -> None:
    result = bench(*QUICK, "--tokenizer", str(tiny), "--json")
    report = json.loads(result.stdout)
    assert report["bench"] == "prefix"
    looked_up = {"lookup_188_p50_us", "lookup_2048_p50_us", "events_per_s", "bytes_per_held_block"}
    assert looked_up | {"hash_12k_ms", "turn_1k_on_12k_ms"} <= report["metrics"].keys()
    assert "hashing and tokenization" in result.stderr

    fleets = {(row["instances"], row["prompt_blocks"]) for row in report["lookups"] if row["structure"] == "FleetIndex"}
    assert fleets == {(instances, blocks) for instances in (1, 2) for blocks in (1, 188, 2_048)}
    assert {"LMDeploy BlockTrie", "PrefixReuseIndex, lookup and verify"} <= {
        row["structure"] for row in report["peers"]
    }
    assert report["not_run"].keys() == {"SGLang RadixCache", "replays of traces"}


def test_host_prints_each_figure_as_lmdeploy_and_as_kvgate_do_it(tiny: Path) -> None:
    result = bench("host", "--model", str(tiny), "--prompt-tokens", "2000", "--streams", "4", "--quick", "--json")
    report = json.loads(result.stdout)
    figures = (
        "loop hold first request",
        "loop hold later turn",
        "tokenize first request",
        "tokenize later turn",
        "loop hold encode",
        "first text",
        "text of a token",
        "last of streams",
    )
    assert tuple(row["what"] for row in report["host_figures"]) == figures
    for row in report["host_figures"]:
        name = f"{row['what'].replace(' ', '_')}_{row['unit']}"
        assert (report["metrics"][f"stock_{name}"], report["metrics"][name]) == (row["LMDeploy"], row["kvgate"])
    assert report["not_run"] == {"first requests": "--starts measures them"}


def write_lines(path: Path, lines: list[dict[str, object]]) -> None:
    path.parent.mkdir()
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Mooncake: four of seven blocks come again. Agentic: of two sessions, one's three blocks come again."""
    write_lines(
        tmp_path / "mooncake" / "conversation_trace.jsonl.gz",
        [{"hash_ids": [1], "input_length": 512}]
        + [{"hash_ids": [1, place], "input_length": 1_024} for place in (2, 3)]
        + [{"hash_ids": [1, 2], "input_length": 1_000}],
    )
    write_lines(
        tmp_path / "agentic" / "agentic_dev.jsonl.gz",
        [
            {"session": session, "t": t, "in": 192, "runs": [[0, 3]]}
            for session, t in (("first", 0.0), ("first", 9.0), ("second", 1.0))
        ],
    )
    return tmp_path


def test_prefix_prints_markdown_with_the_replays(tiny: Path, traces: Path) -> None:
    text = bench(*QUICK, "--tokenizer", str(tiny), "--traces", str(traces), "--markdown").stdout
    assert "| lookup_188_p50_us | " in text
    assert "| ceiling_mooncake_blocks_ratio | 0.5714 |" in text
    assert "| ceiling_agentic_tokens_ratio | 0.3333 |" in text
    assert "| agentic_together | 1,000 | 3 | 0.3333 | 0.3333 | 0.3333 | 1.0 |" in text
    assert "| SGLang RadixCache | give --peer sglang=FOLDER" in text


def test_prefix_prints_tables_for_people(tiny: Path) -> None:
    text = bench(*QUICK, "--tokenizer", str(tiny)).stdout
    assert "NaiveFleetIndex, every answer" in text
    assert "miss_p99_us" in text


def test_a_folder_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"no tokenizer\.json"):
        bench("prefix", "--tokenizer", str(tmp_path))


def test_a_folder_without_traces_is_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="there is no mooncake"):
        bench("prefix", "--tokenizer", str(tiny), "--traces", str(tmp_path))


@pytest.mark.parametrize("peer", ["sglang", "sglang=", "vllm=/tmp"])
def test_an_unknown_peer_is_refused_with_the_known_one(peer: str) -> None:
    with pytest.raises(CommandError) as refused:
        bench("prefix", "--peer", peer)
    assert refused.value.advice == "write --peer sglang=FOLDER"


def test_a_peers_folder_without_it_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"there is no sglang/srt/mem_cache/radix_cache\.py"):
        bench("prefix", "--peer", f"sglang={tmp_path}")


def test_pool_prints_one_json_object_and_nothing_else() -> None:
    result = bench("pool", "--quick", "--blocks", "4096", "--json")
    report = json.loads(result.stdout)
    assert report["bench"] == "pool"
    assert {"alloc_p50_us", "alloc_p99_us", "fragmentation_max_pct", "utilisation_pct"} <= report["metrics"].keys()
    assert report["metrics"]["alloc_occupancy_min_pct"] >= 95
    assert {row["calls"] for row in report["allocations"]} >= {"all of the stream", "one block", "a whole prompt"}
    assert "compaction" in result.stderr


def test_pool_names_the_trace_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="there is no azure/"):
        bench("pool", "--traces", str(tmp_path))


def test_pool_says_that_it_draws_lengths_where_there_are_no_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(pool, "BESIDE_CHECKOUT", tmp_path / "none")
    assert [each.name for each in pool.workloads(None, said.append)] == ["lognormal"]
    assert "log-normal" in said[0]


def test_evict_prints_one_json_object_with_the_worst_of_all_policies() -> None:
    result = bench("evict", "--quick", "--json")
    report = json.loads(result.stdout)
    assert report["bench"] == "evict"
    assert {"victim_p99_us_1e5", "victim_p99_us_1e6", "victims200_ms", "loop_5us_p99_us"} <= report["metrics"].keys()
    ones = [row for row in report["decisions"] if row["victims"] == 1]
    assert {row["policy"] for row in ones} == set(POLICIES)
    assert report["metrics"]["victim_p99_us_1e6"] == max(row["p99_us"] for row in ones if row["blocks"] == 4_000)
    assert "lru: 2,000 blocks" in result.stderr
    assert "--quick" in next(iter(report["not_run"].values()))


def test_shadow_prints_what_following_a_request_costs() -> None:
    report = json.loads(bench("shadow", "--quick", "--policy", "lru,mq(lifetime=2)", "--json").stdout)
    assert report["bench"] == "shadow"
    assert report["metrics"]["shadow_us_per_request"] > 0
    assert [row["candidates"] for row in report["shadows"]] == [2, 2, 2]
    assert report["shadows"][-1]["sampled_ratio"] < 0.02


def test_telemetry_prints_what_accounting_a_request_costs() -> None:
    report = json.loads(bench("telemetry", "--quick", "--json").stdout)
    assert report["bench"] == "telemetry"
    metrics = report["metrics"]
    together = metrics["marks_us_per_request"] + metrics["settle_us_per_request"]
    assert metrics["metrics_us_per_request"] == pytest.approx(together, rel=0.01)
    together += metrics["tracing_off_us_per_request"]
    assert metrics["metrics_and_tracing_off_us_per_request"] == pytest.approx(together, rel=0.01)
    assert all(value > 0 for value in metrics.values())


def test_schedule_prints_what_decisions_cost_and_what_strategies_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pool, "BESIDE_CHECKOUT", tmp_path / "nothing")
    result = bench("schedule", "--quick", "--strategy", "fifo,priority", "--json")
    report = json.loads(result.stdout)
    assert report["bench"] == "schedule"
    assert {"plan_p99_us", "order_1k_p99_us", "order_10k_p99_us"} <= report["metrics"].keys()
    assert [row["case"] for row in report["plans"]] == ["hybrid", "separated", "shared"]
    assert {row["instances"] for row in report["plans"]} == {64}
    assert {row["strategy"] for row in report["orders"]} == {"fifo", "priority"}
    assert {row["strategy"] for row in report["served"]} == {"fifo", "priority"}
    assert "--quick" in next(iter(report["not_run"].values()))


@pytest.mark.parametrize("asked", ["best", ","])
def test_a_strategy_that_is_not_there_is_named_with_those_that_are(asked: str) -> None:
    with pytest.raises(CommandError, match="--strategy"):
        bench("schedule", "--strategy", asked)


def test_schedule_refuses_a_folder_without_traces_before_it_measures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(schedule, "_plans", None)  # which would measure
    with pytest.raises(CommandError, match="there is no azure/"):
        bench("schedule", "--quick", "--traces", str(tmp_path))


def test_hierarchy_serves_both_traces_through_all_tiers_and_draws_them(traces: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = bench("hierarchy", "--traces", str(traces), "--policy", "lru,mq", "--plot", str(tmp_path), "--json")
    report = json.loads(result.stdout)
    assert report["bench"] == "hierarchy"
    assert report["metrics"]["conversation_hbm_ddr_share_of_ceiling"] == 1
    assert {row["policy"] for row in report["served"]} == {"lru", "mq"}
    for trace in ("agentic", "conversation"):
        assert (tmp_path / f"hierarchy-{trace}.png").stat().st_size > 1_000


def test_hierarchy_refuses_what_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="--policy: unknown policy 'lur'"):
        bench("hierarchy", "--policy", "lur")
    with pytest.raises(CommandError, match="there is no agentic/agentic_dev"):
        bench("hierarchy", "--traces", str(tmp_path))
    with pytest.raises(CommandError, match="no such folder"):
        bench("hierarchy", "--plot", str(tmp_path / "none"))


def test_predict_judges_the_named_predictors_beside_the_statistical_one(traces: Path) -> None:
    (traces / "azure").mkdir()
    rows = [
        f"2023-11-16 18:15:{number % 60:02}.6805900,{100 * (1 + number % 3)},{10 * (1 + number % 3)}\n"
        for number in range(90)
    ]
    with gzip.open(traces / "azure" / "AzureLLMInferenceTrace_conv.csv.gz", "wt", encoding="utf-8") as file:
        file.writelines(["TIMESTAMP,ContextTokens,GeneratedTokens\n", *rows])
    for name, line in (
        ("mooncake/conversation_trace.jsonl.gz", {"hash_ids": [0, 1], "input_length": 700, "output_length": 5}),
        ("agentic/agentic_dev.jsonl.gz", {"session": "a", "runs": [[0, 3]], "in": 192, "out": 7}),
    ):
        with gzip.open(traces / name, "wt", encoding="utf-8") as file:
            for second in range(0, 1_200, 10):
                file.write(json.dumps({"timestamp": 1_000 * second, "t": second} | line) + "\n")
    result = bench("predict", "--traces", str(traces), "--predictors", "constant", "--quick", "--json")
    report = json.loads(result.stdout)
    assert report["bench"] == "predict"
    assert {row["predictor"] for row in report["lifetimes"]} == {"constant", "statistical"}
    assert report["metrics"]["azure_mae_gain"] > 0.5
    assert report["metrics"]["conversation_returns_mae"] < 1
    assert {row["trace"] for row in report["prefetches"]} == {"agentic", "conversation"}


def test_predict_refuses_what_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="--predictors: there is no 'oracle': there are constant, statistical, lstm"):
        bench("predict", "--predictors", "oracle")
    with pytest.raises(CommandError, match="there is no agentic/agentic_dev"):
        bench("predict", "--traces", str(tmp_path))


def test_evict_measures_the_named_policies_and_refuses_what_there_is_not() -> None:
    report = json.loads(bench("evict", "--quick", "--policy", "predictive,qos", "--json").stdout)
    assert {row["policy"] for row in report["decisions"]} == {"predictive", "qos"}
    with pytest.raises(CommandError, match="--policy: unknown policy 'lur'; known: lru"):
        bench("evict", "--policy", "lur")
    with pytest.raises(CommandError, match="--policy names none"):
        bench("evict", "--policy", ",")


def test_adaptive_is_held_beside_lru_on_every_trace_of_a_folder(traces: Path) -> None:
    result = bench("adaptive", "--quick", "--traces", str(traces), "--jobs", "1", "--json")
    report = json.loads(result.stdout)
    assert report["metrics"]["behind_floor"] == 0
    rows = {(row["workload"], row["capacity_blocks"]) for row in report["beside_lru"]}
    assert {("mooncake/conversation_trace.jsonl.gz", 8), ("agentic/agentic_dev.jsonl.gz", 200)} <= rows
    assert any(row["workload"].startswith("random habits") for row in report["beside_lru"])


def test_a_quick_look_at_a_large_trace_replays_its_beginning(tmp_path: Path) -> None:
    lines = [{"session": "s", "t": 9.0 * turn, "in": 64 * 3000, "runs": [[turn, 3000]]} for turn in range(100)]
    (tmp_path / "large.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = json.loads(bench("adaptive", "--quick", "--traces", str(tmp_path), "--jobs", "1", "--json").stdout)
    assert [row["requests"] for row in report["beside_lru"] if row["workload"] == "large.jsonl"] == [33, 33]
    assert report["not_run"] == {"most capacities and seeds, and traces to their ends": "--quick"}


def test_a_policy_that_falls_behind_lru_fails_with_where_it_does(traces: Path) -> None:
    arguments = (
        "adaptive",
        "--policy",
        "lfu",
        "--traces",
        str(traces),
        "--capacity",
        "8",
        "--seeds",
        "3",
        "--jobs",
        "1",
    )
    with pytest.raises(CommandError, match=r"lfu is behind what is promised: random habits, seed \d"):
        CliRunner().invoke(build_bench(), list(arguments), catch_exceptions=False)


def test_adaptive_refuses_a_folder_without_traces(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="there is no trace"):
        CliRunner().invoke(build_bench(), ["adaptive", "--traces", str(tmp_path)], catch_exceptions=False)


def test_attention_kernels_are_measured_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CommandError, match="there is no CUDA device here"):
        bench("attention")
    with pytest.raises(CommandError, match="heads must be a multiple of KV heads"):
        bench("attention", "--heads", "7", "--kv-heads", "2")
